"""`python -m polar.rewards FILE.py …`: run reward programs until stopped."""

import argparse
import sys

from polar.errors import SettingsError
from polar.rewards.running import run


def main() -> int:
    """Exit status 2 when a file or a setting is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m polar.rewards",
        description="Score trajectories with the @reward functions of Python files.",
        epilog="The broker is named by POLAR_BOOTSTRAP_SERVERS and POLAR_TOPIC_PREFIX.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE.py")
    try:
        run(parser.parse_args().files)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

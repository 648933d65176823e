"""Laws of the scheduler under any interleaving of records, crashes and node failures."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schemas.sessions import Outcome
from tests.unit.rollout.scheduler_world import LIMITS, World, request

OUTCOMES = st.sampled_from([Outcome.COMPLETED, Outcome.AGENT_ERROR, Outcome.TIMED_OUT, Outcome.INFRA_ERROR])


class SchedulerMachine(RuleBasedStateMachine):
    """Steps of the outside world and of the scheduler's shell, in any order."""

    @initialize()
    def start(self) -> None:
        self.world = World()
        self.count = 0
        self.was_given_up = False
        self.world.boot()

    # -- the shell ----------------------------------------------------------------------------

    @rule(data=st.data())
    def read_one(self, data: st.DataObject) -> None:
        self.world.read(data.draw(st.sampled_from(sorted(self.world.log))))

    @rule()
    def read_all(self) -> None:
        self.world.drain()

    @rule(data=st.data(), kept=st.integers(0, 3))
    def crash_while_writing(self, data: st.DataObject, kept: int) -> None:
        if self.world.read(data.draw(st.sampled_from(sorted(self.world.log))), crash_after=kept):
            self.world.boot()

    @rule()
    def crash(self) -> None:
        self.world.crash()
        self.world.boot()

    @rule()
    def commit(self) -> None:
        self.world.commit()

    @rule(seconds=st.sampled_from([0.2, 1.0, 4.0]))
    def tick(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.tick()

    # -- users --------------------------------------------------------------------------------

    @precondition(lambda self: self.count < 6)
    @rule(num_samples=st.integers(1, 3), runtime=st.sampled_from("ab"), twice=st.booleans())
    def submit(self, num_samples: int, runtime: str, twice: bool) -> None:
        for _ in range(2 if twice else 1):
            self.world.submit(f"t{self.count}", request(num_samples, runtime=runtime, max_attempts=2))
        self.count += 1

    @precondition(lambda self: self.count > 0)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(f"t{data.draw(st.integers(0, self.count - 1))}")

    # -- nodes --------------------------------------------------------------------------------

    @rule()
    def beat(self) -> None:
        self.world.beat()

    @rule(name=st.sampled_from(["n0", "n1", "g0"]))
    def one_beats(self, name: str) -> None:
        self.world.beat(name)

    @rule(name=st.sampled_from(["n0", "n1"]))
    def handle_command(self, name: str) -> None:
        self.world.handle_command(self.world.nodes[name])

    @rule(name=st.sampled_from(["n0", "n1"]))
    def refill(self, name: str) -> None:
        self.world.refill(self.world.nodes[name])

    @rule(name=st.sampled_from(["n0", "n1"]), outcome=OUTCOMES, sealed=st.booleans(), data=st.data())
    def work(self, name: str, outcome: Outcome, sealed: bool, data: st.DataObject) -> None:
        node = self.world.nodes[name]
        if node.sessions:
            session_id = data.draw(st.sampled_from(sorted(node.sessions)))
            if session_id in node.running:
                self.world.finish(node, session_id, outcome, sealed=sealed or outcome is Outcome.COMPLETED)
            else:
                self.world.start(node, session_id)

    @rule(name=st.sampled_from(["n0", "n1"]))
    def restart_node(self, name: str) -> None:
        self.world.restart_node(self.world.nodes[name])

    @rule(name=st.sampled_from(["n0", "n1", "g0"]))
    def falls_silent_and_comes_back(self, name: str) -> None:
        """It is given up, and tried elsewhere, while it goes on."""
        self.was_given_up = True
        node = self.world.nodes.get(name)
        if node is None:
            self.world.gateways = set()
        else:
            node.is_alive = False
        for _ in range(5 if node is not None else 13):
            self.world.now += 2.5
            self.world.beat()
            self.world.drain()
            self.world.tick()
        if node is None:
            self.world.gateways = {name}
        else:
            node.is_alive = True

    @rule()
    def the_log_is_silent(self) -> None:
        self.world.now += 2 * LIMITS.gateway_timeout
        self.world.tick()

    # -- laws ---------------------------------------------------------------------------------

    @invariant()
    def no_session_is_placed_twice(self) -> None:
        self.world.check()

    @invariant()
    def the_ready_buffer_never_exceeds_its_target(self) -> None:
        # A node that was given up and comes back brings its runtimes along.
        if not self.was_given_up:
            for digest in {digest for node in self.world.nodes.values() for digest in node.idle}:
                held = sum(node.idle.get(digest, 0) for node in self.world.nodes.values())
                assert held <= LIMITS.ready_target

    def teardown(self) -> None:
        """A healthy system brings every task to its end and the buffer to its target."""
        for _ in range(40):
            self.world.round()
            self.world.check()
        core = self.world.core
        assert core is not None
        assert core.is_deciding
        assert set(self.world.fixed()) == {f"t{number}" for number in range(self.count)}
        assert not core.book.tasks
        assert not core.book.live
        assert not core.book._sessions
        assert not any(node.sessions for node in self.world.nodes.values())
        for task_id, fixed in self.world.fixed().items():
            assert len({member.session_id.split("/")[1] for member in fixed.members}) == len(fixed.members), (
                task_id
            )
        self.world.crash()
        self.world.boot()
        written = len(self.world.of())
        self.world.drain()
        assert not self.world.core.book.tasks if self.world.core else True
        assert len(self.world.of()) == written
        self.world.submit("last", request(50, runtime="z"))
        for _ in range(4):
            self.world.round(finish=False)
        assert self.world.idle_runtimes == LIMITS.ready_target


TestSchedulerLaws = SchedulerMachine.TestCase
TestSchedulerLaws.settings = settings(
    max_examples=50,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

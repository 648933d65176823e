"""Child processes that never outlive their parent, and a supervisor that keeps them running."""

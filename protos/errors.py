"""What is wrong with how the worker plane was set up."""


class PlaneError(Exception):
    """An address, a secret or a certificate that cannot be used; `field` names which."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

"""How what is not installed gets installed: Millrace comes as a checkout, its extras are in pyproject.toml."""

OVERRIDES = {"cpu-vllm": " --override deploy/cpu-overrides.txt"}
"""What an extra is installed with."""


def how_to_install(*extras: str, reinstall: bool = False) -> str:
    """`uv pip install -e '.[gpu-vllm]' in the checkout`; of several extras one is enough."""
    named = " or ".join(f"'.[{extra}]'{OVERRIDES.get(extra, '')}" for extra in extras)
    return f"uv pip install {'--reinstall ' if reinstall else ''}-e {named} in the checkout"

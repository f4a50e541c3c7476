"""The addresses of one or several coordinators, of which one leads."""

import re

from millrace.errors import InvalidState, wrong_value

MOST_ADDRESSES = 16
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\],@]+):(\d{1,5})")
"""host:port"""


def addresses(text: str, field: str = "MILLRACE_COORDINATOR") -> list[str]:
    """The addresses, host:port each, in a list with commas; a single one as it is. Raises InvalidState, which names the
    `field`."""
    found = [each.strip() for each in text.split(",")]
    if len(found) == 1:
        return found
    for each in found:
        match = ADDRESS.fullmatch(each)
        if match is None or not 0 < int(match[2]) < 65_536:
            raise _not_addresses(field, text, f"{each or 'an empty address'} is not host:port")
    if len(set(found)) < len(found):
        raise _not_addresses(field, text, "an address comes twice")
    if len(found) > MOST_ADDRESSES:
        raise _not_addresses(field, text, f"holds more than {MOST_ADDRESSES} addresses")
    return found


def _not_addresses(field: str, text: str, reason: str) -> InvalidState:
    wrong = wrong_value(field, text, reason, "write host1:7600,host2:7600: the address of each coordinator once.")
    return InvalidState(wrong.what, wrong.fix)

"""Commands that permissions of files bind, also where the tests run as root."""

import os


def bound_by_permissions() -> list[str]:
    """What goes before a command for that: root loses the right to write what nobody may write."""
    return [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]

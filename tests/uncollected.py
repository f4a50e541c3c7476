"""Imported first by a server from which tests fork processes: no garbage is collected until `tests.frozen`.

There is next to none in what is imported, and to look for it takes a second of a core.
"""

import gc

gc.disable()

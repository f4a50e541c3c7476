"""Imported last by a server from which tests fork processes: collections of garbage leave out what is there by then.

It stays to the end, and a trainer that gets a job, or an engine that starts, would look through all of it, for half a
second of a core.
"""

import atexit
import gc

gc.freeze()
gc.enable()
atexit.register(gc.unfreeze)  # libraries tell at exit whether anything of theirs is left

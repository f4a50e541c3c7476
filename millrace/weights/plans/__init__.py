"""Who sends which box of which tensor to whom. Pure computation: no sockets, and no torch except in `memory.py`."""

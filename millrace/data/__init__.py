"""Prompt sources: Parquet and JSONL in verl's columns, and procedural tasks. No torch.

`open_source` opens a `PromptSource`: rows by number, each a `PromptRow`, and an order for every pass. A file that
cannot be used is refused when it is opened (InvalidJob), a bad row when it is read (BadRow). `chat` turns a row into
tokens, `model_folder` checks the files of a model, `write` writes rows that `open_source` reads.
"""

from millrace.data.open_source import open_source
from millrace.data.order import Order
from millrace.data.prompt_source import PromptSource
from millrace.data.row import Message, PromptRow

__all__ = ["Message", "Order", "PromptRow", "PromptSource", "open_source"]

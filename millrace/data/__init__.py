"""Prompt sources: Parquet and JSON in the columns of verl, TRL, OpenAI or one's own, and procedural tasks. No torch.

`open_section` opens what a job names as a `PromptSource`: rows by number, each a `PromptRow`, and an order for every
pass. A file that cannot be used is refused when it is opened (InvalidJob), a bad row when it is read (BadRow). `chat`
turns a row into tokens, `model_folder` checks the files of a model, `write` writes rows that `open_source` reads.
"""

from millrace.data.columns.layout import Reading
from millrace.data.columns.messages import Message
from millrace.data.open_source import open_section, open_source
from millrace.data.prompt_source import Order, PromptSource
from millrace.data.row import PromptRow

__all__ = ["Message", "Order", "PromptRow", "PromptSource", "Reading", "open_section", "open_source"]

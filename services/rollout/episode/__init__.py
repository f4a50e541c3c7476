"""An episode as data: its prompt, chat format, conversation, turns and slot of the engine."""

"""How the ranks connect, receive commands, exchange data, and show that they are alive."""

"""How ranks find each other, hear commands, agree, and show that they are alive."""

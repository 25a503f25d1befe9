"""Text: from committed tokens to characters and back to prompts."""

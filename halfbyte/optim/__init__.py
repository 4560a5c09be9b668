"""Low-bit Adam and AdamW. Importing this needs torch alone."""

from halfbyte.optim.adamw import Adam, Adam4bit, Adam8bit, AdamFp8, AdamW, AdamW4bit, AdamW8bit, AdamWFp8

__all__ = ["Adam", "Adam4bit", "Adam8bit", "AdamFp8", "AdamW", "AdamW4bit", "AdamW8bit", "AdamWFp8"]

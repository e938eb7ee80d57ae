"""Samples as text and as token ids: their parts, chat formats, and where settings cut them."""

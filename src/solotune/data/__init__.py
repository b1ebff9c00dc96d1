"""Rows to messages, label masks, packs and batches."""

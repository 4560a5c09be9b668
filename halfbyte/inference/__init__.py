"""Trying what was trained: load base, adapter or merged model, answer prompts, measure held-out loss."""

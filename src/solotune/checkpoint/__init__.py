"""Model folders and resume state, in and out, tensor by tensor."""

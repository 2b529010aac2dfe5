"""Where blocks are: `blocks` is what look-ups read, `rocks` is what survives a restart. The files are the truth."""

"""One module a competitor. Each has

NEEDS        the modules that have to be installed
batches(work)  batches without end: uint8 arrays or tensors, or tuples that begin with one
prepare(work, into)  optional: convert `work.photos`, into a folder; what it returns becomes `work.data`
"""

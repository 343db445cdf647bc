"""Files and folders on disk: publishing, verifying, locks; arrays, tables and tensors; the cache of compiled kernels."""

"""Files and folders on disk: publish, verify, lock; arrays and tensors; compiled kernels."""

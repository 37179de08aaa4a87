"""The policy loss: its function, options, plain torch version and kernels."""

"""JAX under strandline: a loop that leaks, found with its Python line. Nothing of strandline is in this file.

    XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async strandline run -- python examples/frameworks/jax_async.py

With JAX's `cuda_async` allocator every array is one allocation of CUDA's (cuMemAllocFromPoolAsync), which strandline
watches. With the default one (a pool of three quarters of the GPU) there is nothing to see, and with `platform` hardly
anything: since jaxlib 0.11 at the latest, that one maps memory by itself. Steps are taken from the period of the
allocations.
"""

import jax
import jax.numpy as jnp

STEPS = 120
history = []


@jax.jit
def forward(weights, batch):
    return jnp.tanh(batch @ weights).sum(axis=0)


weights = jnp.ones((1024, 1024), dtype=jnp.float32)
for number in range(STEPS):
    batch = jax.device_put(jnp.full((256, 1024), number / STEPS, dtype=jnp.float32))
    history.append(forward(weights, batch))  # the leak: 4 KiB of GPU memory a step
print(f"kept {len(history)} on {history[0].devices()}")

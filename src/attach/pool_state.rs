//! Pools of CUDA graphs put back to an earlier state, as torch's graph trees want it.
//!
//! Must not know how a pool is put back. Invariant: to the ledger, a block that is there before and after is one
//! block all the time, and one that comes back is as old as it was; nothing is a survivor because of this.

use super::gpu::Gpus;
use super::process;
use super::torch::{PoolState, Refusal, Restored};
use crate::heap::{BlockInfo, Checkpoint, HeapError, PoolId};

/// A checkpoint and the GPU that it is of.
struct Taken {
    device: i32,
    checkpoint: Checkpoint,
}

const WHAT_TO_DO: &str = "Let the graphs be recorded anew (torch.compiler.reset()), or do without graph trees: \
                          torch._inductor.config.triton.cudagraph_trees = False";

fn refused(what: &str, why: &str) -> Refusal {
    Refusal::Failed(format!("strandline cannot {what} a pool of CUDA graphs: {why}. {WHAT_TO_DO}."))
}

fn because(what: &str, error: &HeapError) -> Refusal {
    refused(what, &error.to_string())
}

impl Gpus {
    /// What a pool has handed out.
    ///
    /// # Errors
    /// If the heap has no such pool, or does not serve the device.
    pub fn checkpoint_pool(&self, device: i32, pool: PoolId) -> Result<PoolState, Refusal> {
        const WHAT: &str = "note down the blocks of";
        let Some(served) = self.known(device).filter(|_| !process::is_detached()) else {
            return Err(refused(WHAT, &format!("GPU {device} has no memory of it")));
        };
        let taken = served.lock().heap.checkpoint(pool);
        let checkpoint = taken.map_err(|error| because(WHAT, &error))?;
        Ok(Box::new(Taken { device, checkpoint }))
    }

    /// Puts a pool back to what it had handed out.
    ///
    /// # Errors
    /// If that is not possible; the pool is as it was then.
    pub fn restore_pool(&self, device: i32, state: &PoolState) -> Result<Restored, Refusal> {
        const WHAT: &str = "put back";
        let taken = state.downcast_ref::<Taken>().filter(|taken| taken.device == device);
        let Some(taken) = taken else {
            return Err(refused(WHAT, &format!("its state was not taken on GPU {device}")));
        };
        let Some(served) = self.known(device).filter(|_| !process::is_detached()) else {
            return Err(refused(WHAT, &format!("GPU {device} has no memory of it")));
        };
        let restored =
            served.restore(&taken.checkpoint, self.clock).map_err(|error| because(WHAT, &error))?;
        let told = |blocks: &[BlockInfo]| blocks.iter().map(|b| (b.address, b.requested)).collect();
        Ok(Restored { freed: told(&restored.freed), allocated: told(&restored.allocated) })
    }
}

//! What PyTorch asks of its CUDA allocator, as one trait, and the place where the heap is put behind it.
//!
//! | file | job |
//! |---|---|
//! | `torch.rs` | [`Service`], what the functions below need; [`install`] |
//! | `torch/hooks.rs` | the plain C functions that `CUDAPluggableAllocator` takes |
//! | `torch/methods.rs` | replacing the methods of torch's allocator object |
//! | `torch/calls.rs` | what the C++ side (`cuda/`) calls |
//! | `torch/pools.rs` | use counts of pools, the filters that choose a pool |
//! | `torch/checkpoints.rs` | pools put back to an earlier state |
//! | `torch/stats.rs` | torch's statistics and snapshot, as structs and as JSON |
//! | `torch/autograd.rs` | the forward line of a backward allocation |
//! | `torch/share.rs` | handles by which another process opens a block |
//! | `torch/profiler.rs` | memory events of torch's profiler: watched, and reported |
//! | `torch/queries.rs` | JSON answers for the Python side |
//!
//! Must not know: the heap's or the ledger's insides. Invariants: nothing here panics into torch, takes
//! Python's GIL, or returns a null pointer where torch expects memory; before [`install`] every function
//! does nothing.

pub mod autograd;
pub mod calls;
pub mod checkpoints;
pub mod hooks;
pub mod methods;
pub mod pools;
pub mod profiler;
pub mod queries;
pub mod share;
pub mod stats;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicPtr, Ordering};

pub use self::checkpoints::{PoolState, Restored};
pub use self::pools::Filter;
pub use self::share::Shared;
pub use self::stats::{BlockInfo, Frame, SegmentInfo, Snapshot, Stat, Stats, TraceEntry};
use super::history::Wish;
use crate::driver::{Address, MemoryInfo, Stream};

/// A pool as torch names it (`MempoolId_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolId(pub u64, pub u64);

/// Why the service did not do what it was asked. The text is for the user, whole sentences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Everything was tried: becomes `torch.OutOfMemoryError`.
    OutOfMemory(String),
    /// Anything else: becomes `RuntimeError`.
    Failed(String),
}

impl Refusal {
    fn unsupported(what: &str) -> Refusal {
        Refusal::Failed(format!("strandline does not support {what} here."))
    }
}

/// An allocator of GPU memory, as torch uses one. Devices are torch's indices, which are the driver's
/// ordinals. Called from any thread, with and without the GIL, never concurrently with [`install`].
///
/// Methods with a default are features that torch can live without; their defaults decline.
pub trait Service: Send + Sync {
    /// Memory for `size` > 0 bytes, to be used on `stream`.
    fn malloc(&self, size: usize, device: i32, stream: Stream) -> Result<Address, Refusal>;
    /// Takes memory back; called at most once per address that `malloc` gave. May come while the process
    /// exits.
    fn free(&self, at: Address);
    /// `at` is also used by work that was sent to `stream` up to the moment when it will be freed. Torch names
    /// foreign memory too: unknown addresses are ignored.
    fn record_stream(&self, at: Address, stream: Stream);
    /// Gives cached memory back to the driver: of one pool, or of all that is not in a pool's use.
    fn empty_cache(&self, pool: Option<PoolId>);

    /// CUDA is being initialised with so many devices.
    fn devices(&self, _count: i32) {}
    /// Of the device's memory, how much this process may use.
    fn set_memory_fraction(&self, fraction: f64, device: i32);
    fn memory_fraction(&self, device: i32) -> f64;
    /// The segment (start, bytes) that an address lies in.
    fn base_allocation(&self, at: Address) -> Option<(Address, u64)>;
    /// The most that one allocation could get now (cached or from the driver); cuDNN chooses workspaces by it.
    fn largest_available(&self, device: i32) -> u64;
    /// What the driver says of the device's memory.
    fn memory_info(&self, device: i32) -> Option<MemoryInfo>;

    /// From now on, allocations on streams that `filter` accepts come from `pool`. The filter may be asked
    /// under the heap's lock; it must be dropped at `end_pool`.
    /// Answers whether that is so; if not, the reason was said on stderr.
    fn begin_pool(&self, device: i32, pool: PoolId, filter: Filter) -> bool;
    fn end_pool(&self, device: i32, pool: PoolId);
    /// Nobody uses the pool any more: when its blocks are free, its memory is.
    fn release_pool(&self, device: i32, pool: PoolId);
    /// The addresses of a pool's live blocks.
    fn pool_blocks(&self, _device: i32, _pool: PoolId) -> Option<Vec<Address>> {
        None
    }

    /// What a pool has handed out, for [`restore`](Self::restore).
    fn checkpoint(&self, _device: i32, _pool: PoolId) -> Result<PoolState, Refusal> {
        Err(Refusal::unsupported("checkpoints of pools"))
    }
    /// Takes back whatever the state's pool has handed out, and hands out the state's blocks again, at their
    /// addresses. Where that cannot be, nothing changes.
    fn restore(&self, _device: i32, _state: &PoolState) -> Result<Restored, Refusal> {
        Err(Refusal::unsupported("checkpoints of pools"))
    }

    /// `None` for a device on which nothing was allocated yet.
    fn stats(&self, device: i32) -> Option<Stats>;
    /// Allocated and reserved bytes; called often, only while torch's profiler records memory.
    fn totals(&self, device: i32) -> (u64, u64);
    /// The size of a live block as it was requested; called only while torch's profiler records memory.
    fn requested_size(&self, _at: Address) -> Option<(u64, i32)> {
        None
    }
    fn reset_peak(&self, device: i32);
    fn reset_accumulated(&self, device: i32);
    /// The state of all devices or of one pool, in the form of torch's snapshots.
    fn snapshot(&self, pool: Option<PoolId>, traces: bool) -> Snapshot;
    /// `torch.cuda.memory._record_memory_history`: keep past events for snapshots.
    fn record_history(&self, wish: &Wish);

    /// Whether blocks come from the cache (the usual), or each from the driver, for tools that watch the driver.
    fn enable_cache(&self, _on: bool) {}

    /// Kernels of `peer` shall reach memory of `device`.
    fn enable_peer(&self, _device: i32, _peer: i32) -> Result<(), Refusal> {
        Ok(())
    }
    /// Copies between devices without peer access, in `stream`'s order.
    fn copy_between(
        &self,
        _to: (Address, i32),
        _from: (Address, i32),
        _size: u64,
        _stream: Stream,
    ) -> Result<(), Refusal> {
        Err(Refusal::unsupported("copies between devices without peer access"))
    }
    /// Describes the memory under a live block to another process.
    fn share(&self, _at: Address) -> Result<Shared, Refusal> {
        Err(Refusal::unsupported("sharing CUDA tensors between processes"))
    }
    /// Opens pieces (descriptors of this process, sizes) that another process shared; their start here.
    fn open_shared(&self, _device: i32, _pieces: &[(i32, u64)]) -> Result<Address, Refusal> {
        Err(Refusal::unsupported("opening CUDA tensors of other processes"))
    }
    fn close_shared(&self, _at: Address) {}

    /// Observer mode: torch's own allocator gave (`size` > 0) or took back (`size` < 0) a block. Called
    /// under torch's allocator lock: takes neither the GIL nor memory of the GPU.
    fn observed(&self, _at: Address, _size: i64, _device: i32, _allocated: u64, _reserved: u64) {}
}

/// The service in force: a leaked box, because frees arrive until the very end of the process.
static SERVICE: AtomicPtr<&'static dyn Service> = AtomicPtr::new(std::ptr::null_mut());

/// Puts a service behind torch's functions. The first one stays: torch's blocks belong to it. Answers
/// whether this call was the first.
pub fn install(service: &'static dyn Service) -> bool {
    let place = Box::into_raw(Box::new(service));
    let first =
        SERVICE.compare_exchange(std::ptr::null_mut(), place, Ordering::AcqRel, Ordering::Acquire).is_ok();
    if !first {
        // SAFETY: the box was made above and nobody else has seen it.
        drop(unsafe { Box::from_raw(place) });
    }
    first
}

/// The service, once installed.
#[inline]
pub fn service() -> Option<&'static dyn Service> {
    let place = SERVICE.load(Ordering::Acquire);
    // SAFETY: null, or a box that `install` leaked.
    unsafe { place.as_ref() }.copied()
}

/// Runs what torch asked for. `None` where strandline is not active, or had a fault of its own: that is said
/// on stderr once and never reaches torch.
#[inline]
fn guarded<T>(what: &str, run: impl FnOnce(&'static dyn Service) -> T) -> Option<T> {
    let service = service()?;
    let outcome = catch_unwind(AssertUnwindSafe(|| run(service)));
    if outcome.is_err() {
        // The books may be half changed: from now on no block comes from them.
        super::process::fault(what);
    }
    outcome.ok()
}

/// One line on stderr, the first time only: this may be called for every block.
fn complain_once(text: &str) {
    use std::sync::atomic::AtomicBool;
    static SAID: AtomicBool = AtomicBool::new(false);
    super::say_once(&SAID, format_args!("{text}"));
}

//! The seam between the heap and a device: everything that the heap asks of a device, and nothing else.
//!
//! Two devices stand behind it: [`host`] (host memory that behaves as a device) and `cuda` (the CUDA
//! driver). The heap knows neither; it sees addresses, pages, streams and events. All sizes and
//! addresses are in bytes. No function here may take a lock of the heap, take Python's GIL, or panic.

pub mod cost;
pub mod cuda;
pub mod host;
pub mod journal;
pub mod loader;

use std::fmt;

/// A virtual address of a device.
pub type Address = u64;

/// A stream as the framework names it (a `cudaStream_t` value; 0 is the default stream).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Stream(pub u64);

/// The driver's name for one piece of physical memory (one or more pages), made by [`Driver::create`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle(pub u64);

/// A point in a stream's work, made by [`Driver::record_event`]; given back by [`Driver::release_event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(pub u64);

/// Why a driver call did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriverError {
    /// No physical memory is left for the request.
    OutOfMemory,
    /// The driver (or this device) does not have the function asked for.
    Unsupported(&'static str),
    /// A driver call failed: its name and the driver's own code.
    Failed { call: &'static str, code: i32 },
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DriverError::OutOfMemory => write!(f, "out of device memory"),
            DriverError::Unsupported(what) => write!(f, "{what} is not supported by this driver"),
            DriverError::Failed { call, code } => write!(f, "{call} failed with code {code}"),
        }
    }
}

impl std::error::Error for DriverError {}

/// Shorthand for what every driver call returns.
pub type Result<T> = std::result::Result<T, DriverError>;

/// Physical memory of the device as the driver sees it, other processes included. Bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct MemoryInfo {
    pub free: u64,
    pub total: u64,
}

/// What a heap asks of one device.
///
/// Calls are made under the heap's lock and may come from any thread. A `Driver` never calls back.
pub trait Driver: Send {
    /// Whether virtual memory management (reserve/create/map) is there; else only `allocate`/`deallocate`.
    fn has_virtual_memory(&self) -> bool;
    /// The unit of physical memory: handles are multiples of it. Bytes.
    fn granularity(&self) -> u64;
    /// Whether one handle may be mapped at several addresses at the same time. Work that is ordered (by a
    /// stream) sees at one address what earlier work wrote at another.
    fn has_aliases(&self) -> bool {
        false
    }
    /// Free and total physical memory. Bytes.
    fn memory_info(&self) -> Result<MemoryInfo>;

    /// Reserves a range of addresses without memory behind it; aligned to the granularity.
    fn reserve(&self, size: u64) -> Result<Address>;
    /// Gives a reserved range back; nothing may be mapped in it.
    fn unreserve(&self, at: Address, size: u64) -> Result<()>;
    /// Creates one piece of physical memory.
    fn create(&self, size: u64) -> Result<Handle>;
    /// Destroys a piece of physical memory; it must not be mapped.
    fn destroy(&self, handle: Handle) -> Result<()>;
    /// Maps a whole handle at `at` and grants access to the device and its peers. The mapping's size is
    /// the handle's. On failure nothing is mapped.
    fn map(&self, at: Address, size: u64, handle: Handle) -> Result<()>;
    /// Takes the mapping of one whole handle at `at` away; the physical memory and its content stay.
    fn unmap(&self, at: Address, size: u64) -> Result<()>;

    /// A plain segment where virtual memory management is missing (`cuMemAlloc`).
    fn allocate(&self, size: u64) -> Result<Address>;
    /// Gives a plain segment back.
    fn deallocate(&self, at: Address, size: u64) -> Result<()>;

    /// Records an event at the present end of `stream`'s work.
    fn record_event(&self, stream: Stream) -> Result<Event>;
    /// Records an event at the present end of the work of the whole device, as far as this process sent it:
    /// of every stream where the driver can do that (CUDA 12.5), else at least of `streams`.
    fn record_device_event(&self, streams: &[Stream]) -> Result<Event>;
    /// Whether all work before the event is done.
    fn query_event(&self, event: Event) -> Result<bool>;
    /// Waits (on the host) until the event is done.
    fn wait_event(&self, event: Event) -> Result<()>;
    /// Gives the event back.
    fn release_event(&self, event: Event) -> Result<()>;
    /// Makes later work of `stream` wait for the event, without blocking the host.
    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()>;
    /// Waits (on the host) until `stream` has no work left.
    fn synchronize_stream(&self, stream: Stream) -> Result<()>;
    /// Waits (on the host) until the device has no work left.
    fn synchronize_device(&self) -> Result<()>;
    /// Whether work sent to `stream` is being captured into a graph.
    fn is_capturing(&self, stream: Stream) -> Result<bool>;

    /// What this driver's calls have cost so far, if it counts that.
    fn costs(&self) -> Option<&cost::Costs> {
        None
    }

    /// Where this driver notes what it maps and unmaps, if it does.
    fn journal(&self) -> Option<&journal::Journal> {
        None
    }
}

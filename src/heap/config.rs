//! What a heap is told at its birth, and the words it speaks: tags, pool names, errors.
//!
//! It knows no mechanism.

use std::fmt;

use super::{Address, DriverError, Stream};

/// 16 bytes that a caller attaches to a block; opaque to the heap, returned on free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tag(pub u64, pub u64);

/// The name of a private pool (PyTorch's `MempoolId_t`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolId(pub u64, pub u64);

/// How a heap behaves.
#[derive(Clone, Debug)]
pub struct Config {
    /// The device's number; only passed on to [`AddressSpace`](super::AddressSpace).
    pub device: u32,
    /// Alignment of every block and the smallest block size, in bytes: a power of two from 64 to 512.
    pub minimum: u64,
    /// Most bytes of physical memory that the heap may hold; none for the device's own limit.
    pub limit: Option<u64>,
    /// How far, in thousandths of the peak of active bytes, physical memory may grow before idle pages
    /// are mapped elsewhere instead of new ones made.
    pub slack: u32,
    /// The same, once so many were mapped elsewhere that requests are given the places that they had before.
    pub slack_moving: u32,
    /// The same for blocks that are expected to stay: the peak rises with them.
    pub slack_kept: u32,
    /// Thousandths of the peak by which memory that is not expected to move may be made before it is needed, while half of
    /// the device is free: a job that keeps something in every step then asks the driver in one of several. Unless it
    /// is 0, such memory comes in pieces as large as its need, up to the largest.
    pub ahead: u32,
    /// By how much the first two may widen while pages are mapped more often than the requests served have
    /// paid for.
    pub slack_hurried: u32,
    /// By how much they may widen further while pages go on being mapped though requests are given the places that
    /// they had before.
    pub slack_unsettled: u32,
    /// The same, when the idle pages could be taken only by making the host wait for a stream.
    pub slack_before_wait: u32,
    /// Thousandths of the device that are left to others in this process (kernels, NCCL, cuBLAS) while idle
    /// memory can be used instead.
    pub spared: u32,
    /// The largest single piece of physical memory, in bytes.
    pub largest_handle: u64,
    /// A piece that may move is at most this part of what is held: it moves as a whole, and each costs calls.
    pub pieces: u64,
    /// What it is taken to cost to map a page where nothing is mapped, in microseconds. On an H200 a call takes 37,
    /// but most pieces have several pages: with less, others are disturbed less, and more is reserved.
    pub map_cost: u64,
    /// Bytes of addresses that one region of large segments spans; none for four times the device.
    pub region: Option<u64>,
}

/// What a heap on a GPU is to save.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preset {
    /// Time: what a job is served with unless it asks otherwise.
    #[default]
    Speed,
    /// Memory.
    Lean,
}

impl Preset {
    pub const ALL: [(&'static str, Preset); 2] = [("speed", Preset::Speed), ("lean", Preset::Lean)];

    pub fn name(self) -> &'static str {
        Self::ALL[usize::from(self == Preset::Lean)].0
    }
}

impl std::str::FromStr for Preset {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
        found.map(|&(_, preset)| preset).ok_or_else(|| format!("'{text}' is neither speed nor lean"))
    }
}

impl Config {
    /// For the memory of a GPU: blocks of 512 bytes and more. A training job would rather reserve more than
    /// wait. Best fit alone serves most jobs: idle memory is mapped elsewhere only if it comes to nearly a third
    /// of what is in use, or if the device has no other.
    pub fn speed() -> Self {
        Config {
            slack: 300,
            slack_moving: 100,
            slack_kept: 100,
            ahead: 4,
            slack_hurried: 10,
            slack_unsettled: 50,
            slack_before_wait: 1000,
            pieces: 128,
            map_cost: 25,
            ..Self::lean()
        }
    }

    /// The settings of a preset.
    pub fn of(preset: Preset) -> Self {
        match preset {
            Preset::Speed => Self::speed(),
            Preset::Lean => Self::lean(),
        }
    }

    /// For as little reserved memory as can be, at the cost of driver calls and waits.
    pub fn lean() -> Self {
        Config {
            device: 0,
            minimum: 512,
            limit: None,
            slack: 15,
            slack_moving: 22,
            slack_kept: 28,
            ahead: 0,
            slack_hurried: 5,
            slack_unsettled: 0,
            // A wait stalls the GPU's queue: one in each step of a 20 ms loop cost a quarter of its speed.
            slack_before_wait: 50,
            spared: 8,
            largest_handle: 32 << 20,
            pieces: 512,
            map_cost: 37,
            region: None,
        }
    }

    /// For host memory: blocks of 64 bytes and more. Moving a page costs the kernel as much as touching a
    /// new one, and untouched pages cost nothing, so more slack is given.
    pub fn host() -> Self {
        Config {
            minimum: 64,
            slack: 100,
            slack_moving: 100,
            slack_kept: 100,
            slack_before_wait: 100,
            spared: 0,
            ..Self::lean()
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self::speed()
    }
}

/// Why the heap did not do what it was asked. Nothing has changed then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeapError {
    /// Nothing that could be given up was left to give up. All in bytes.
    OutOfMemory {
        requested: u64,
        /// In blocks handed out.
        allocated: u64,
        /// Mapped by this heap.
        reserved: u64,
        /// Reserved by private pools.
        in_pools: u64,
        /// Free on the device.
        free: u64,
        /// Of these, left to others in the process (kernels that are loaded when first used).
        left: u64,
        /// Of the device.
        total: u64,
        /// The heap's own limit, if it has one.
        limit: Option<u64>,
    },
    /// The address is not the start of a block that is handed out: foreign, freed before, or inside one.
    NotOurs { address: Address },
    /// The driver failed, other than for lack of memory.
    Driver(DriverError),
    /// The pool is not known, or is being recorded to already.
    Pool { id: PoolId, why: &'static str },
    /// The configuration makes no sense.
    Config(&'static str),
}

impl fmt::Display for HeapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HeapError::OutOfMemory { requested, allocated, reserved, in_pools, free, left, total, limit } => {
                write!(
                    f,
                    "out of memory: tried to allocate {requested} bytes; {allocated} allocated, \
                     {reserved} reserved ({in_pools} in private pools), {free} of {total} free on the device \
                     ({left} are left to others)"
                )?;
                match limit {
                    Some(limit) => write!(f, ", limit {limit}"),
                    None => Ok(()),
                }
            }
            HeapError::NotOurs { address } => write!(f, "{address:#x} is not a block of this heap"),
            HeapError::Driver(error) => write!(f, "{error}"),
            HeapError::Pool { id, why } => write!(f, "pool ({}, {}): {why}", id.0, id.1),
            HeapError::Config(why) => write!(f, "{why}"),
        }
    }
}

impl std::error::Error for HeapError {}

impl From<DriverError> for HeapError {
    fn from(error: DriverError) -> Self {
        HeapError::Driver(error)
    }
}

/// What [`Heap::free`](super::Heap::free) tells about the block that was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// Bytes asked for.
    pub requested: u64,
    /// Bytes of the block.
    pub size: u64,
    /// The stream that it was allocated on.
    pub stream: Stream,
    pub tag: Tag,
}

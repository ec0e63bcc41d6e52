//! The caching allocator of one device.
//!
//! One [`Heap`] serves all streams of one device; its owner keeps it under one lock. What happens to a
//! request of `size` bytes on a stream:
//!
//! ```text
//! malloc ─▶ lane (stream, pool) ─▶ ≤ 64 KiB: a slot of a slab          size_class, slab, slabs
//!                              └─▶ else: where it lay a step ago,    trail, retrace
//!                                  or best fit among free ranges     fitted, fit, block
//!   nothing fits ─▶ finished events ─▶ grow: idle pages are mapped    stream, grow, window,
//!                                      where they are needed, or made   stitch, segment
//!   no memory ─▶ other streams' caches, released pools, a wait        pressure, pool
//! ```
//!
//! Nothing is written to device memory. malloc and free touch the system allocator only when a table
//! grows. The heap must not know frameworks, Python, stacks or the ledger: a [`Tag`] is opaque. Invariants
//! are stated by each file and checked together by [`Heap::check`].
#![forbid(unsafe_code)]

mod address_space;
mod arena;
mod block;
mod chain;
mod check;
mod checkpoint;
mod config;
mod fit;
mod fitted;
mod gauge;
mod give_back;
mod grow;
mod occupancy;
mod pool;
mod pressure;
mod retrace;
mod segment;
mod size_class;
mod slab;
mod slabs;
mod slot;
mod snapshot;
mod stats;
mod stitch;
mod stream;
mod trail;
mod window;

/// What is lock-free is built on these, so that it can be tried out on others.
mod atomic {
    pub(super) use std::sync::atomic::{AtomicU64, Ordering};
}

use foldhash::fast::FixedState;
use hashbrown::{HashMap, HashSet};

pub use crate::driver::{Address, Stream};
use crate::driver::{Driver, DriverError, Event, Handle};
pub use address_space::AddressSpace;
pub use checkpoint::{Checkpoint, Restored};
pub use config::{Config, Freed, HeapError, PoolId, Preset, Tag};
pub use occupancy::Occupancy;
pub use pool::Filter;
pub use snapshot::{BlockInfo, BlockState, Seen, SegmentInfo};
pub use stats::{DriverWork, Split, Stat, Stats};

use arena::{Lane, RUNS, kind_of, lane_of, part_of};
use block::{Blocks, NONE, State};
use fit::GRAIN;
use pool::Pools;
use segment::{Found, Space, named_by};
use size_class::{Classes, EAGER_MAX, SLAB_MAX};
use slab::{Slabs, SlotState, run_for};
use stats::Ledgers;
use stream::{Handed, Marks, Pending};

/// Requests up to this size (after rounding) are *small* in the statistics and lie in segments of their
/// own, as PyTorch's do. Bytes.
pub const SMALL_MAX: u64 = 1 << 20;
/// The smallest fitted block: a table's granule must not hold two starts.
const FITTED_MIN: u64 = EAGER_MAX + GRAIN;
/// Pending blocks are looked at once in so many mallocs, at first more often; and whenever nothing fits.
const POLL: u32 = 16;

/// The caching allocator of one device.
pub struct Heap<D: Driver> {
    driver: D,
    config: Config,
    classes: Classes,
    /// Physical memory of the device, in bytes, as it was at the heap's birth.
    total: u64,
    /// The largest request that could ever be served; bytes.
    largest: u64,
    /// The driver has no virtual memory management.
    plain: bool,
    /// The driver can map one handle at several addresses at once.
    aliases: bool,
    /// Counts surveys of what is idle, and searches in them.
    survey: u64,
    search: u64,
    /// Looks at pages that searches may still spend.
    patience: i64,
    /// Storage for the places of rivals.
    places: HashSet<(Address, u64), FixedState>,
    /// Storage of the search for a window.
    spans: Vec<chain::Span>,
    chain: chain::Chain,
    /// The share of the latest large requests that did not get a place they had before, in 2^-20.
    strays: u64,
    blocks: Blocks,
    slabs: Slabs,
    lanes: Vec<Lane>,
    lane_of: HashMap<(u32, Stream), u16, FixedState>,
    /// The stream that asked last and its lane in everybody's pool; none while a pool is being recorded to.
    last: Option<(Stream, u16)>,
    space: Space,
    pending: Pending,
    marks: Marks,
    pools: Pools,
    stats: Ledgers,
    /// Counts frees: the heap's time.
    clock: u64,
    until_poll: u32,
    /// Mallocs between the next two looks.
    poll_gap: u32,
    /// What the driver last said was free, and how much the heap held then.
    seen: Option<(u64, u64)>,
    /// Requests from this size on are huge; bytes.
    huge_from: u64,
    /// Before so many bytes were moved, no lane gets a trail again.
    retrace_from: u64,
    /// So many mappings of idle memory are made until requests have settled in the places that they had before.
    moves_to_settle: u64,
}

impl<D: Driver> Heap<D> {
    /// A heap over a device; asks the driver for nothing but its size.
    ///
    /// # Errors
    /// [`HeapError::Config`] if the configuration or the driver's granularity cannot be served,
    /// [`HeapError::Driver`] if the driver cannot tell its size.
    pub fn new(driver: D, config: Config) -> Result<Self, HeapError> {
        if !config.minimum.is_power_of_two() || !(64..=512).contains(&config.minimum) {
            return Err(HeapError::Config("minimum must be a power of two from 64 to 512"));
        }
        let plain = !driver.has_virtual_memory();
        if !plain && !segment::PAGE.is_multiple_of(driver.granularity().max(1)) {
            return Err(HeapError::Config("the driver's granularity does not divide 2 MiB"));
        }
        let aliases = driver.has_aliases();
        let total = driver.memory_info()?.total;
        Ok(Heap {
            classes: Classes::new(config.minimum),
            driver,
            config,
            total,
            largest: total.min(1 << 46) / GRAIN * GRAIN,
            plain,
            aliases,
            survey: 0,
            search: 0,
            strays: 0,
            patience: retrace::PATIENCE,
            places: HashSet::default(),
            spans: Vec::new(),
            chain: chain::Chain::default(),
            blocks: Blocks::new(),
            slabs: Slabs::new(),
            lanes: Vec::new(),
            lane_of: HashMap::default(),
            last: None,
            space: Space::new(),
            pending: Pending::default(),
            marks: Marks::default(),
            pools: Pools::new(),
            stats: Ledgers::default(),
            clock: 0,
            until_poll: POLL,
            poll_gap: POLL,
            seen: None,
            huge_from: u64::MAX,
            retrace_from: 0,
            moves_to_settle: u64::MAX,
        })
    }

    /// The driver that the heap was made with.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    /// Hands out at least `size` bytes for use on `stream`; 0 gives a block of the smallest size.
    /// The address is aligned to [`Config::minimum`] (to 512 from 4 KiB on).
    ///
    /// # Errors
    /// [`HeapError::OutOfMemory`] if nothing is left to give up, [`HeapError::Driver`] if the driver fails
    /// otherwise. The heap is as before then, and stays usable.
    #[inline]
    pub fn malloc(&mut self, size: u64, stream: Stream, tag: Tag) -> Result<Address, HeapError> {
        self.malloc_from(0, size, stream, tag)
    }

    /// The same for a request whose place in the program is known: requests from one place have the same
    /// number, and 0 says nothing. It helps the heap to see that a job repeats itself, and changes nothing
    /// else.
    ///
    /// # Errors
    /// As [`malloc`](Self::malloc).
    #[inline]
    pub fn malloc_from(
        &mut self,
        site: u32,
        size: u64,
        stream: Stream,
        tag: Tag,
    ) -> Result<Address, HeapError> {
        if self.pending.blocks != 0 {
            self.poll();
        }
        let lane = self.lane(stream)?;
        if size <= SLAB_MAX {
            self.malloc_slot(lane, size, tag)
        } else {
            self.malloc_block(lane, site, size, tag)
        }
    }

    /// Takes a block back. It can be handed out on its stream at once, and elsewhere when all streams
    /// that use it are done.
    ///
    /// # Errors
    /// [`HeapError::NotOurs`] if no block that is handed out starts at `at`; nothing changes then.
    #[inline]
    pub fn free(&mut self, at: Address) -> Result<Freed, HeapError> {
        let not_ours = HeapError::NotOurs { address: at };
        let Some(entry) = self.space.entry(at) else { return Err(not_ours) };
        let (is_slab, id) = named_by(*entry);
        if is_slab {
            return self.free_slot(id, at).ok_or(not_ours);
        }
        let block = self.blocks[id];
        if block.addr != at || block.state != State::Live {
            return Err(not_ours);
        }
        if block.b != NONE {
            return Ok(self.free_used(id));
        }
        *entry = 0;
        Ok(self.free_block(id, block))
    }

    /// Notes that `stream` uses the block: after its free the block waits for the work that the stream
    /// has by then. The block's own stream is ignored.
    ///
    /// # Errors
    /// [`HeapError::NotOurs`] if no block that is handed out starts at `at`.
    pub fn record_stream(&mut self, at: Address, stream: Stream) -> Result<(), HeapError> {
        let handed = self.live_at(at)?;
        if self.stream_of(handed) == stream {
            return Ok(());
        }
        let mut uses = self.uses_of(handed);
        if uses == NONE {
            uses = self.pending.new_uses();
            match handed {
                Handed::Block(id) => self.blocks[id].b = uses,
                Handed::Slot(slab, slot) => self.slabs[slab].meta[slot as usize].uses = uses,
            }
        }
        let streams = &mut self.pending.uses_mut(uses).streams;
        if !streams.contains(&stream) {
            streams.push(stream);
        }
        Ok(())
    }

    /// The tag of a block that is handed out.
    ///
    /// # Errors
    /// [`HeapError::NotOurs`] if no block that is handed out starts at `at`.
    pub fn tag_mut(&mut self, at: Address) -> Result<&mut Tag, HeapError> {
        Ok(match self.live_at(at)? {
            Handed::Block(id) => &mut self.blocks[id].tag,
            Handed::Slot(slab, slot) => &mut self.slabs[slab].meta[slot as usize].tag,
        })
    }

    /// The statistics at this moment.
    pub fn stats(&self) -> Stats {
        let driver = self.driver.costs().map(|costs| costs.all()).unwrap_or_default();
        Stats { driver, ..self.stats.snapshot() }
    }

    /// Bytes in blocks that are handed out: `allocated_bytes.all.current`, without the rest.
    #[inline]
    pub fn allocated(&self) -> u64 {
        self.stats.allocated_bytes()
    }

    /// Bytes of mapped memory: `reserved_bytes.all.current`, without the rest.
    #[inline]
    pub fn reserved(&self) -> u64 {
        self.stats.reserved_bytes.now()
    }

    /// The most bytes that were handed out at a time since the last call of this function; a reset of the
    /// peaks does not touch it.
    pub fn take_recent_peak(&mut self) -> u64 {
        self.stats.take_recent_peak()
    }

    /// Sets every peak to the present value.
    pub fn reset_peak(&mut self) {
        self.stats.reset_peak();
    }

    /// Sets every accumulated sum, and the counts of retries and out-of-memory errors, to 0.
    pub fn reset_accumulated(&mut self) {
        self.stats.reset_accumulated();
    }

    /// Limits the physical memory that the heap may hold, in bytes; what it holds already it keeps.
    pub fn set_limit(&mut self, limit: Option<u64>) {
        self.config.limit = limit;
    }

    /// The limit that is set, in bytes.
    pub fn limit(&self) -> Option<u64> {
        self.config.limit
    }

    /// The block that is handed out at exactly this address.
    fn live_at(&self, at: Address) -> Result<Handed, HeapError> {
        match self.space.find(at) {
            Found::Block(id) if self.blocks[id].addr == at && self.blocks[id].state == State::Live => {
                Ok(Handed::Block(id))
            }
            Found::Slab(id) => {
                let slab = &self.slabs[id];
                let slot = slab.slot_of(at);
                let live = slab.meta.get(slot).is_some_and(|meta| meta.state() == SlotState::Live);
                let found = (live && slab.address(slot) == at).then_some(Handed::Slot(id, slot as u16));
                found.ok_or(HeapError::NotOurs { address: at })
            }
            _ => Err(HeapError::NotOurs { address: at }),
        }
    }

    fn arena_of(&self, handed: Handed) -> u16 {
        match handed {
            Handed::Block(id) => self.blocks[id].arena,
            Handed::Slot(slab, _) => self.slabs[slab].arena,
        }
    }

    /// The stream that a block was handed to.
    fn stream_of(&self, handed: Handed) -> Stream {
        let lent = self.pending.uses(self.uses_of(handed)).and_then(|uses| uses.lent_to);
        lent.unwrap_or_else(|| self.lanes[lane_of(self.arena_of(handed))].stream)
    }

    #[inline]
    fn lane(&mut self, stream: Stream) -> Result<usize, HeapError> {
        match self.last {
            Some((last, lane)) if last == stream => Ok(lane as usize),
            _ => self.find_lane(stream),
        }
    }

    #[cold]
    fn find_lane(&mut self, stream: Stream) -> Result<usize, HeapError> {
        let pool = if self.pools.recording() { self.route(stream) } else { 0 };
        let lane = match self.lane_of.get(&(pool, stream)) {
            Some(&lane) => lane,
            None => {
                let free = self.lanes.iter().position(|lane| !lane.in_use);
                let index = free.unwrap_or(self.lanes.len());
                if index >= usize::from(u16::MAX / 8) {
                    return Err(HeapError::Config("too many streams"));
                }
                match free {
                    Some(index) => self.lanes[index] = Lane::new(stream, pool),
                    None => self.lanes.push(Lane::new(stream, pool)),
                }
                self.lane_of.insert((pool, stream), index as u16);
                index as u16
            }
        };
        self.last = (!self.pools.recording()).then_some((stream, lane));
        Ok(lane as usize)
    }

    #[cold]
    fn poll(&mut self) {
        self.until_poll -= 1;
        if self.until_poll == 0 {
            self.until_poll = self.poll_gap;
            self.poll_gap = (self.poll_gap * 2).min(POLL);
            self.process_events();
        }
    }
}

impl<D: Driver> Drop for Heap<D> {
    fn drop(&mut self) {
        self.dismantle();
    }
}

#[cfg(test)]
mod tests;

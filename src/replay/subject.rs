//! The allocator that a recording is replayed through, and strandline's heap as one.
//!
//! Must not know: recordings.
//! Invariant: a block given back while another stream works on it is reusable only after `completed`, or after
//! the allocator has waited for that stream.

use super::price::{Priced, Tally};
use crate::driver::host::{BooksDriver, Options};
use crate::driver::{Address, Stream};
use crate::heap::{Config, Heap, HeapError, Preset, Tag};

/// Streams of the device's own, one per block that another stream still works on.
const WORKERS: u64 = 1 << 60;

/// Bytes that an allocator uses, now and at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    pub requested_peak: u64,
    pub active_peak: u64,
    pub reserved: u64,
    pub reserved_peak: u64,
}

/// What a recording is replayed through.
pub trait Subject {
    /// Hands out `size` bytes to a place in the program (0 is not known); why not, if it cannot.
    fn malloc(&mut self, site: u32, size: u64, stream: Stream) -> Result<Address, String>;
    /// Takes a block back that nothing works on any more but its own stream.
    fn free(&mut self, at: Address) -> Result<(), String>;
    /// Takes a block back on which another stream still works; returns the name of that work.
    fn free_in_use(&mut self, at: Address) -> Result<u64, String>;
    /// That work is done.
    fn completed(&mut self, work: u64);
    fn figures(&self) -> Figures;
    fn tally(&self) -> Tally;
}

/// strandline's heap over a device that keeps books only.
pub struct StrandlineHeap {
    heap: Heap<Priced<BooksDriver>>,
    driver: BooksDriver,
    priced: Priced<BooksDriver>,
    /// Worker streams without work, and how many there are.
    idle: Vec<u64>,
    workers: u64,
}

impl StrandlineHeap {
    /// A heap with the settings of a preset, on a device with `memory` bytes.
    ///
    /// # Errors
    /// If the heap does not accept the device.
    pub fn new(memory: u64, preset: Preset) -> Result<StrandlineHeap, HeapError> {
        let options = Options { memory, ..Options::default() };
        let driver = BooksDriver::new(options);
        let priced = Priced::new(driver.clone());
        let heap = Heap::new(priced.clone(), Config::of(preset))?;
        Ok(StrandlineHeap { heap, driver, priced, idle: Vec::new(), workers: 0 })
    }
}

impl Subject for StrandlineHeap {
    fn malloc(&mut self, site: u32, size: u64, stream: Stream) -> Result<Address, String> {
        self.heap.malloc_from(site, size, stream, Tag::default()).map_err(|error| error.to_string())
    }

    fn free(&mut self, at: Address) -> Result<(), String> {
        self.heap.free(at).map(drop).map_err(|error| error.to_string())
    }

    fn free_in_use(&mut self, at: Address) -> Result<u64, String> {
        // A recording does not tell which stream it is: any will do that has work until `completed`.
        let worker = self.idle.pop().unwrap_or_else(|| {
            self.workers += 1;
            WORKERS + self.workers
        });
        self.driver.submit(Stream(worker));
        self.heap.record_stream(at, Stream(worker)).map_err(|error| error.to_string())?;
        self.heap.free(at).map_err(|error| error.to_string())?;
        Ok(worker)
    }

    fn completed(&mut self, work: u64) {
        self.driver.complete(Stream(work), 1);
        self.idle.push(work);
    }

    fn figures(&self) -> Figures {
        let stats = self.heap.stats();
        Figures {
            requested_peak: stats.requested_bytes.all.peak,
            active_peak: stats.active_bytes.all.peak,
            reserved: stats.reserved_bytes.all.current,
            reserved_peak: stats.reserved_bytes.all.peak,
        }
    }

    fn tally(&self) -> Tally {
        self.priced.tally()
    }
}

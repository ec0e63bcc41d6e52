//! A driver that counts what the heap asks of it and what that would cost on a GPU.
//!
//! Prices are those measured on an H200 (driver 580): memory calls by size, between the measured sizes by
//! the logarithm of the size.
//!
//! Must not know: the heap.
//! Invariant: every call is passed on unchanged; only calls that succeeded are counted.

use crate::driver::{Address, Driver, Event, Handle, MemoryInfo, Result, Stream};
use parking_lot::Mutex;
use serde::Serialize;
use std::sync::Arc;

/// Sizes in MiB that were measured, and microseconds per call at each.
const SIZES: [f64; 5] = [2.0, 20.0, 64.0, 256.0, 1024.0];
type Prices = [f64; 5];
const CREATE: Prices = [14.6, 13.0, 13.8, 23.0, 42.4];
const MAP: Prices = [2.2, 1.5, 1.7, 1.3, 1.4];
const SET_ACCESS: Prices = [34.5, 30.2, 35.2, 41.7, 72.1];
const UNMAP: Prices = [20.3, 20.3, 20.2, 24.4, 34.7];
const RELEASE: Prices = [14.8, 27.3, 46.7, 142.8, 582.5];
/// cudaMalloc and cudaFree.
const ALLOCATE: Prices = [52.8, 58.3, 64.5, 81.4, 125.9];
const DEALLOCATE: Prices = [42.7, 57.2, 82.2, 176.0, 587.0];
const RESERVE_US: f64 = 18.0;
const RECORD_US: f64 = 0.34;
const QUERY_US: f64 = 0.27;
/// Creating and destroying an event.
const EVENT_US: f64 = 0.37;

/// What one call of `size` bytes costs, in microseconds.
fn price(prices: &Prices, size: u64) -> f64 {
    let mib = (size as f64 / (1u64 << 20) as f64).clamp(SIZES[0], SIZES[4]);
    let above = SIZES.iter().position(|known| mib <= *known).unwrap_or(4).max(1);
    let (low, high) = (SIZES[above - 1], SIZES[above]);
    let share = (mib / low).ln() / (high / low).ln();
    prices[above - 1] + share * (prices[above] - prices[above - 1])
}

/// What torch's own allocator pays to allocate (`cudaMalloc`) or free a segment, in microseconds.
pub fn segment_us(size: u64, free: bool) -> f64 {
    price(if free { &DEALLOCATE } else { &ALLOCATE }, size)
}

/// What torch's allocator pays to map or unmap part of an expandable segment, in microseconds.
pub fn expandable_us(size: u64, unmap: bool) -> f64 {
    // It maps one handle of 2 or 20 MiB after the other; one event may tell of many.
    let handle = if size.is_multiple_of(20 << 20) { 20u64 << 20 } else { 2 << 20 };
    let handles = size.div_ceil(handle) as f64;
    let each = if unmap { UNMAP[0] + price(&RELEASE, handle) } else { CREATE[0] + MAP[0] + SET_ACCESS[0] };
    handles * each
}

/// Counted calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Tally {
    pub reserves: u64,
    pub creates: u64,
    pub destroys: u64,
    /// Each with its grant of access.
    pub maps: u64,
    pub unmaps: u64,
    /// Events recorded, queried, waited for.
    pub events: u64,
    pub microseconds: f64,
}

impl Tally {
    /// Calls that make, move or give back memory.
    pub fn memory_calls(&self) -> u64 {
        self.reserves + self.creates + self.destroys + self.maps + self.unmaps
    }
}

/// Counts and prices the calls to another driver. Clones share the tally.
#[derive(Clone)]
pub struct Priced<D> {
    inner: D,
    tally: Arc<Mutex<(Tally, hashbrown::HashMap<Handle, u64>)>>,
}

impl<D: Driver> Priced<D> {
    pub fn new(inner: D) -> Priced<D> {
        Priced { inner, tally: Arc::default() }
    }

    /// What was counted so far.
    pub fn tally(&self) -> Tally {
        self.tally.lock().0
    }

    fn count<T>(&self, done: Result<T>, us: f64, field: impl FnOnce(&mut Tally) -> &mut u64) -> Result<T> {
        if done.is_ok() {
            let tally = &mut self.tally.lock().0;
            *field(tally) += 1;
            tally.microseconds += us;
        }
        done
    }
}

impl<D: Driver> Driver for Priced<D> {
    fn has_virtual_memory(&self) -> bool {
        self.inner.has_virtual_memory()
    }

    fn granularity(&self) -> u64 {
        self.inner.granularity()
    }

    fn has_aliases(&self) -> bool {
        self.inner.has_aliases()
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        self.inner.memory_info()
    }

    fn reserve(&self, size: u64) -> Result<Address> {
        self.count(self.inner.reserve(size), RESERVE_US, |tally| &mut tally.reserves)
    }

    fn unreserve(&self, at: Address, size: u64) -> Result<()> {
        self.inner.unreserve(at, size)
    }

    fn create(&self, size: u64) -> Result<Handle> {
        let handle = self.count(self.inner.create(size), price(&CREATE, size), |tally| &mut tally.creates)?;
        self.tally.lock().1.insert(handle, size);
        Ok(handle)
    }

    fn destroy(&self, handle: Handle) -> Result<()> {
        let size = self.tally.lock().1.remove(&handle).unwrap_or(0);
        self.count(self.inner.destroy(handle), price(&RELEASE, size), |tally| &mut tally.destroys)
    }

    fn map(&self, at: Address, size: u64, handle: Handle) -> Result<()> {
        let us = price(&MAP, size) + price(&SET_ACCESS, size);
        self.count(self.inner.map(at, size, handle), us, |tally| &mut tally.maps)
    }

    fn unmap(&self, at: Address, size: u64) -> Result<()> {
        self.count(self.inner.unmap(at, size), price(&UNMAP, size), |tally| &mut tally.unmaps)
    }

    fn allocate(&self, size: u64) -> Result<Address> {
        self.count(self.inner.allocate(size), price(&ALLOCATE, size), |tally| &mut tally.creates)
    }

    fn deallocate(&self, at: Address, size: u64) -> Result<()> {
        self.count(self.inner.deallocate(at, size), price(&DEALLOCATE, size), |tally| &mut tally.destroys)
    }

    fn record_event(&self, stream: Stream) -> Result<Event> {
        self.count(self.inner.record_event(stream), RECORD_US + EVENT_US, |tally| &mut tally.events)
    }

    fn record_device_event(&self, streams: &[Stream]) -> Result<Event> {
        self.inner.record_device_event(streams)
    }

    fn query_event(&self, event: Event) -> Result<bool> {
        self.count(self.inner.query_event(event), QUERY_US, |tally| &mut tally.events)
    }

    fn wait_event(&self, event: Event) -> Result<()> {
        self.count(self.inner.wait_event(event), QUERY_US, |tally| &mut tally.events)
    }

    fn release_event(&self, event: Event) -> Result<()> {
        self.inner.release_event(event)
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        self.count(self.inner.stream_wait_event(stream, event), RECORD_US, |tally| &mut tally.events)
    }

    fn synchronize_stream(&self, stream: Stream) -> Result<()> {
        self.inner.synchronize_stream(stream)
    }

    fn synchronize_device(&self) -> Result<()> {
        self.inner.synchronize_device()
    }

    fn is_capturing(&self, stream: Stream) -> Result<bool> {
        self.inner.is_capturing(stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_are_those_measured_and_between() {
        assert_eq!(price(&CREATE, 2 << 20), 14.6);
        assert_eq!(price(&RELEASE, 1 << 30), 582.5);
        assert_eq!(price(&RELEASE, 8 << 30), 582.5);
        assert_eq!(price(&RELEASE, 0), 14.8);
        let between = price(&RELEASE, 128 << 20);
        assert!((between - (46.7 + 142.8) / 2.0).abs() < 0.1, "{between}");
        assert!((segment_us(20 << 20, false) - 58.3).abs() < 1e-9);
    }
}

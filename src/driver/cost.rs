//! What the driver calls of one device cost the process: how many there were of each kind, how long they
//! took together, and the longest.
//!
//! Must not know: the heap. Invariant: counting takes two readings of the clock and no lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The kinds of calls that are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `cuMemGetInfo`.
    Info,
    /// `cuMemAddressReserve`.
    Reserve,
    /// `cuMemCreate`, or `cuMemAlloc` of a plain segment.
    Create,
    /// `cuMemRelease`, or `cuMemFree` of a plain segment.
    Destroy,
    /// `cuMemMap` with its `cuMemSetAccess`.
    Map,
    /// `cuMemUnmap`.
    Unmap,
    /// Recording an event, on a stream or on the whole device.
    Record,
    /// Asking whether an event has come.
    Query,
    /// The host waits for an event, a stream or the device.
    Wait,
}

impl Call {
    pub const ALL: [(Call, &'static str); 9] = [
        (Call::Info, "info"),
        (Call::Reserve, "reserve"),
        (Call::Create, "create"),
        (Call::Destroy, "destroy"),
        (Call::Map, "map"),
        (Call::Unmap, "unmap"),
        (Call::Record, "record"),
        (Call::Query, "query"),
        (Call::Wait, "wait"),
    ];
}

#[derive(Debug, Default)]
struct Cell {
    calls: AtomicU64,
    nanoseconds: AtomicU64,
    longest: AtomicU64,
}

/// What calls of one kind cost so far. Nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    pub calls: u64,
    pub nanoseconds: u64,
    pub longest: u64,
}

/// The costs of one device.
#[derive(Debug, Default)]
pub struct Costs {
    cells: [Cell; Call::ALL.len()],
}

impl Costs {
    /// Counts one call, which lasts until what is returned is dropped.
    #[inline]
    pub fn time(&self, call: Call) -> Timed<'_> {
        Timed { cell: &self.cells[call as usize], from: Instant::now() }
    }

    /// Everything so far, in the order of [`Call::ALL`].
    pub fn all(&self) -> [Cost; Call::ALL.len()] {
        Call::ALL.map(|(call, _)| self.of(call))
    }

    pub fn of(&self, call: Call) -> Cost {
        let cell = &self.cells[call as usize];
        let read = |value: &AtomicU64| value.load(Ordering::Relaxed);
        Cost { calls: read(&cell.calls), nanoseconds: read(&cell.nanoseconds), longest: read(&cell.longest) }
    }
}

/// A call that is under way.
#[must_use]
#[derive(Debug)]
pub struct Timed<'a> {
    cell: &'a Cell,
    from: Instant,
}

impl Drop for Timed<'_> {
    #[inline]
    fn drop(&mut self) {
        let took = u64::try_from(self.from.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.cell.calls.fetch_add(1, Ordering::Relaxed);
        self.cell.nanoseconds.fetch_add(took, Ordering::Relaxed);
        self.cell.longest.fetch_max(took, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_kind() {
        let costs = Costs::default();
        drop(costs.time(Call::Map));
        let slow = costs.time(Call::Map);
        std::thread::sleep(std::time::Duration::from_millis(2));
        drop(slow);
        let map = costs.of(Call::Map);
        assert_eq!(map.calls, 2);
        assert!(map.longest >= 2_000_000 && map.nanoseconds >= map.longest);
        assert_eq!(costs.of(Call::Wait), Cost::default());
        assert!(Call::ALL.iter().enumerate().all(|(index, &(call, _))| call as usize == index));
    }
}

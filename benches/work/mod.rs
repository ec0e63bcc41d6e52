//! What the benches of the heap do: sizes drawn beforehand, and the heap and the yardstick behind one face.
//!
//! Must not know how it is measured.

use strandline::driver::{Driver, Stream};
use strandline::heap::{Address, Heap, Tag};

use crate::yardstick::Yardstick;

pub const S0: Stream = Stream(0);

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Log-uniform sizes from 512 bytes up to `largest`, and slots to free, drawn beforehand.
pub fn draws(largest: f64) -> Vec<(usize, u64)> {
    let mut random = Random(42);
    (0..1 << 16)
        .map(|_| {
            let unit = (random.next() >> 11) as f64 / (1u64 << 53) as f64;
            let size = 512.0 * (largest / 512.0).powf(unit);
            ((random.next() % 2000) as usize, size as u64)
        })
        .collect()
}

/// What is measured.
pub trait Allocator {
    fn get(&mut self, size: u64, stream: Stream) -> Address;
    fn put(&mut self, at: Address);
}

impl<D: Driver> Allocator for Heap<D> {
    #[inline]
    fn get(&mut self, size: u64, stream: Stream) -> Address {
        self.malloc(size, stream, Tag(1, 2)).expect("memory")
    }

    #[inline]
    fn put(&mut self, at: Address) {
        self.free(at).expect("a live block");
    }
}

impl<D: Driver> Allocator for Yardstick<D> {
    #[inline]
    fn get(&mut self, size: u64, stream: Stream) -> Address {
        self.malloc(size, stream).expect("memory")
    }

    #[inline]
    fn put(&mut self, at: Address) {
        self.free(at);
    }
}

/// Blocks of which a random one is freed and another allocated, again and again.
pub struct Churn<A> {
    heap: A,
    draws: Vec<(usize, u64)>,
    live: Vec<Address>,
    next: usize,
}

impl<A: Allocator> Churn<A> {
    /// 2,000 blocks of up to `largest` bytes.
    pub fn new(mut heap: A, largest: f64) -> Self {
        let draws = draws(largest);
        let live = draws[..2000].iter().map(|&(_, size)| heap.get(size, S0)).collect();
        Churn { heap, draws, live, next: 0 }
    }

    #[inline]
    pub fn turn(&mut self) {
        let (slot, size) = self.draws[self.next & (self.draws.len() - 1)];
        self.next += 1;
        self.heap.put(self.live[slot]);
        self.live[slot] = self.heap.get(size, S0);
    }
}

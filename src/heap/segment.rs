//! Addresses and pages: regions, the segments cut from them, and the handles mapped into segments.
//!
//! A *region* is one reservation of the driver's (or one plain segment) with a table that leads from an
//! address to its block in one step: a granule of the table holds at most one start of a live block,
//! because live blocks of the region's kind are larger than a granule. A *segment* is a part of a region
//! that belongs to one arena. It knows no streams and no policy. Invariants: a page of a segment names the
//! handle that is mapped there; a handle names the segment and page where it is mapped.

use super::block::Id;
use super::{Address, Handle};

/// The unit of physical memory that the heap deals in, in bytes; the driver's granularity divides it.
pub(super) const PAGE: u64 = 2 << 20;

/// Granules of 32 KiB for small requests (fitted blocks are larger than [`SLAB_MAX`](super::size_class::SLAB_MAX)),
/// of 1 MiB for large ones.
const GRANULE_SHIFT: [u32; 2] = [15, 20];

/// An index into [`Space::handles`], plus one in the tables of pages; 0 means no memory.
pub(super) type HandleId = u32;

pub(super) struct Region {
    pub base: Address,
    pub size: u64,
    /// `SMALL` or `LARGE`.
    pub kind: usize,
    /// Bytes already cut into segments.
    used: u64,
    /// One plain allocation of the driver's instead of a reservation.
    pub plain: bool,
    shift: u32,
    table: Vec<u32>,
}

pub(super) struct Segment {
    pub base: Address,
    pub size: u64,
    pub arena: u16,
    pub region: u16,
    /// The block at the base.
    pub first: Id,
    /// Bytes of memory mapped.
    pub mapped: u64,
    /// One plain allocation of the driver's.
    pub plain: bool,
    /// False when its addresses wait for another arena.
    pub in_use: bool,
    pages: Vec<u32>,
}

/// One piece of physical memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub handle: Handle,
    pub size: u64,
    pub at: Address,
    pub segment: u16,
}

/// What an address's granule says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Nothing,
    Block(u32),
    Slab(u32),
}

pub(super) struct Space {
    pub regions: Vec<Region>,
    pub segments: Vec<Segment>,
    handles: Vec<Option<Piece>>,
    vacant: Vec<HandleId>,
    /// Created, but mapped nowhere; only after a driver call failed half-way.
    pub spare: Vec<(Handle, u64)>,
    /// Bytes of all handles and plain segments.
    pub physical: u64,
}

impl Region {
    fn contains(&self, at: Address) -> bool {
        at.wrapping_sub(self.base) < self.size
    }
}

impl Segment {
    #[inline]
    fn page(&self, at: Address) -> usize {
        ((at - self.base) / PAGE) as usize
    }

    pub(super) fn end(&self) -> Address {
        self.base + self.size
    }
}

impl Space {
    pub(super) fn new() -> Self {
        Space {
            regions: Vec::new(),
            segments: Vec::new(),
            handles: Vec::new(),
            vacant: Vec::new(),
            spare: Vec::new(),
            physical: 0,
        }
    }

    pub(super) fn add_region(&mut self, base: Address, size: u64, kind: usize, plain: bool) -> usize {
        let shift = GRANULE_SHIFT[kind];
        let entries = size.div_ceil(1 << shift) as usize;
        let region = Region { base, size, kind, used: 0, plain, shift, table: vec![0; entries] };
        // A plain region that was given back leaves its place.
        match self.regions.iter().position(|region| region.size == 0) {
            Some(index) => {
                self.regions[index] = region;
                index
            }
            None => {
                self.regions.push(region);
                self.regions.len() - 1
            }
        }
    }

    /// Cuts `size` bytes off a region of the kind that has them left.
    pub(super) fn cut(&mut self, kind: usize, size: u64) -> Option<(usize, Address)> {
        let index = self
            .regions
            .iter()
            .position(|region| region.kind == kind && !region.plain && region.size - region.used >= size)?;
        let region = &mut self.regions[index];
        let at = region.base + region.used;
        region.used += size;
        Some((index, at))
    }

    /// A segment that no arena has any more, of at least `size` bytes.
    pub(super) fn abandoned(&self, kind: usize, size: u64) -> Option<u16> {
        self.segments
            .iter()
            .position(|segment| {
                !segment.in_use
                    && !segment.plain
                    && segment.size >= size
                    && self.regions[segment.region as usize].kind == kind
            })
            .map(|index| index as u16)
    }

    /// Writes a new segment down; none if there are too many.
    pub(super) fn add_segment(
        &mut self,
        base: Address,
        size: u64,
        region: usize,
        plain: bool,
    ) -> Option<u16> {
        let segment = Segment {
            base,
            size,
            arena: 0,
            region: region as u16,
            first: 0,
            mapped: 0,
            plain,
            in_use: true,
            pages: vec![0; size.div_ceil(PAGE) as usize],
        };
        let reuse = self.segments.iter().position(|segment| !segment.in_use && segment.size == 0);
        let index = match reuse {
            Some(index) => {
                self.segments[index] = segment;
                index
            }
            None if self.segments.len() < usize::from(u16::MAX) => {
                self.segments.push(segment);
                self.segments.len() - 1
            }
            None => return None,
        };
        Some(index as u16)
    }

    /// Forgets a plain segment and its region.
    pub(super) fn forget_plain(&mut self, index: u16) {
        let segment = &mut self.segments[index as usize];
        (segment.in_use, segment.size, segment.mapped) = (false, 0, 0);
        segment.pages = Vec::new();
        let region = &mut self.regions[segment.region as usize];
        (region.size, region.base, region.used) = (0, 0, 0);
        region.table = Vec::new();
    }

    #[inline]
    fn granule(&self, at: Address) -> Option<(&Region, usize)> {
        let region = self.regions.iter().find(|region| region.contains(at))?;
        Some((region, ((at - region.base) >> region.shift) as usize))
    }

    /// What starts in the address's granule.
    #[inline]
    pub(super) fn find(&self, at: Address) -> Found {
        self.granule(at).map_or(Found::Nothing, |(region, index)| decode(region.table[index]))
    }

    /// What starts in the segment in the address's granule or, failing that, in the nearest before it;
    /// with `strictly` only before it.
    pub(super) fn find_before(&self, segment: u16, at: Address, strictly: bool) -> Found {
        let segment = &self.segments[segment as usize];
        let region = &self.regions[segment.region as usize];
        let index = |at: Address| ((at - region.base) >> region.shift) as usize;
        let entries = &region.table[index(segment.base)..index(at) + usize::from(!strictly)];
        entries.iter().rev().find(|&&entry| entry != 0).map_or(Found::Nothing, |&entry| decode(entry))
    }

    #[inline]
    fn write(&mut self, region: u16, at: Address, value: u32) {
        let region = &mut self.regions[region as usize];
        let index = ((at - region.base) >> region.shift) as usize;
        region.table[index] = value;
    }

    #[inline]
    pub(super) fn set_block(&mut self, segment: u16, at: Address, id: Id) {
        let region = self.segments[segment as usize].region;
        self.write(region, at, (id + 1) << 1);
    }

    #[inline]
    pub(super) fn clear(&mut self, segment: u16, at: Address) {
        let region = self.segments[segment as usize].region;
        self.write(region, at, 0);
    }

    /// Names a slab in every granule whose start lies in it, or clears them.
    pub(super) fn set_slab(&mut self, segment: u16, at: Address, size: u64, slab: Option<u32>) {
        let index = self.segments[segment as usize].region;
        let region = &mut self.regions[index as usize];
        let value = slab.map_or(0, |slab| (slab + 1) << 1 | 1);
        let first = (at - region.base).div_ceil(1 << region.shift) as usize;
        let last = ((at - region.base + size - 1) >> region.shift) as usize;
        region.table[first..=last].fill(value);
    }

    pub(super) fn piece_at(&self, segment: u16, at: Address) -> Option<(HandleId, Piece)> {
        let segment = &self.segments[segment as usize];
        let id = segment.pages.get(segment.page(at)).copied().filter(|&id| id != 0)? - 1;
        self.handles[id as usize].map(|piece| (id, piece))
    }

    /// Writes down that a handle is mapped.
    pub(super) fn place(&mut self, piece: Piece) {
        let id = match self.vacant.pop() {
            Some(id) => id,
            None => {
                self.handles.push(None);
                (self.handles.len() - 1) as HandleId
            }
        };
        self.handles[id as usize] = Some(piece);
        let segment = &mut self.segments[piece.segment as usize];
        let (first, count) = (segment.page(piece.at), (piece.size / PAGE) as usize);
        segment.pages[first..first + count].fill(id + 1);
        segment.mapped += piece.size;
    }

    /// Writes down that a handle is mapped no more.
    pub(super) fn displace(&mut self, id: HandleId) {
        if let Some(piece) = self.handles[id as usize].take() {
            let segment = &mut self.segments[piece.segment as usize];
            let (first, count) = (segment.page(piece.at), (piece.size / PAGE) as usize);
            segment.pages[first..first + count].fill(0);
            segment.mapped -= piece.size;
            self.vacant.push(id);
        }
    }

    /// The first handle that lies wholly in the range of addresses and is at most `largest` bytes.
    pub(super) fn piece_within(
        &self,
        segment: u16,
        from: Address,
        to: Address,
        largest: u64,
    ) -> Option<(HandleId, Piece)> {
        let base = self.segments[segment as usize].base;
        let mut at = base + (from - base).next_multiple_of(PAGE);
        while at + PAGE <= to {
            let (id, piece) = self.piece_at(segment, at)?;
            if piece.at >= from && piece.at + piece.size <= to && piece.size <= largest {
                return Some((id, piece));
            }
            at = piece.at + piece.size;
        }
        None
    }

    pub(super) fn pieces(&self) -> impl Iterator<Item = &Piece> {
        self.handles.iter().flatten()
    }
}

#[inline]
fn decode(entry: u32) -> Found {
    match entry {
        0 => Found::Nothing,
        entry if entry & 1 == 1 => Found::Slab((entry >> 1) - 1),
        entry => Found::Block((entry >> 1) - 1),
    }
}

//! Addresses and pages: regions, the segments cut from them, and the handles mapped into segments.
//!
//! A *region* is one reservation of the driver's (or one plain segment) with a table that leads from an
//! address to its block in one step: a granule of the table holds at most one start of a live block or of a
//! range without memory, because those of the region's kind are larger than a granule. A *segment* is a part
//! of a region that belongs to one arena. A handle is *present* at one address; where it was present before,
//! it may still be mapped as a *shadow*, so that it can come back without a call to the driver.
//!
//! It knows no streams and no policy. Invariants: a page of a segment names the handle that is mapped there,
//! present or as a shadow; a handle names every place where it is mapped; a block has memory where, and only
//! where, handles are present.

use std::cell::Cell;
use std::ops::Range;

use super::block::Id;
use super::{Address, Handle};

/// The unit of physical memory that the heap deals in, in bytes; the driver's granularity divides it.
pub(super) const PAGE: u64 = 2 << 20;

/// Granules of 32 KiB for small requests (fitted blocks are larger than [`EAGER_MAX`](super::size_class::EAGER_MAX)),
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
    /// One bit for each granule in which something may start: where nothing does, it is cleared by who looks.
    marks: Vec<Cell<u64>>,
}

/// One page of a segment.
#[derive(Clone, Copy, Default)]
struct Page {
    /// The handle that is mapped there, plus one, or 0.
    handle: u32,
    /// How many pages of the handle lie before this one, and behind it.
    before: u8,
    behind: u8,
    /// If the handle is a shadow there, the shadow's clock.
    clock: u64,
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
    /// Up to the highest page that was ever mapped.
    pages: Vec<Page>,
}

/// A place where a handle is mapped, but not present.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shadow {
    pub at: Address,
    pub segment: u16,
    /// The heap's clock at the last free there: until the segment's lane is quiet up to it, work may use the
    /// address.
    pub clock: u64,
}

/// One handle and where it is mapped.
#[derive(Debug)]
struct Held {
    piece: Piece,
    shadows: Vec<Shadow>,
    /// The survey that last found it idle, and how.
    surveyed: u64,
    /// The search that last counted it in.
    counted: u64,
    /// The survey that last found it wanted.
    wanted: u64,
}

/// One piece of physical memory and where it is present.
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
    handles: Vec<Option<Held>>,
    vacant: Vec<HandleId>,
    /// Created, but mapped nowhere; only after a driver call failed half-way.
    pub spare: Vec<(Handle, u64)>,
    /// Bytes of all handles and plain segments.
    pub physical: u64,
    /// Places where handles are mapped but not present.
    pub shadows: usize,
}

impl Region {
    #[inline(always)]
    fn contains(&self, at: Address) -> bool {
        at.wrapping_sub(self.base) < self.size
    }

    /// The granule of an address of the region.
    #[inline(always)]
    fn granule(&self, at: Address) -> usize {
        ((at - self.base) >> self.shift) as usize
    }

    /// Notes that something may start in a granule.
    #[inline(always)]
    fn mark(&self, granule: usize) {
        let marks = &self.marks[granule / 64];
        marks.set(marks.get() | 1 << (granule % 64));
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

    /// Bytes up to the highest page that was ever mapped.
    fn used(&self) -> u64 {
        self.pages.len() as u64 * PAGE
    }

    pub(super) fn contains(&self, at: Address) -> bool {
        at.wrapping_sub(self.base) < self.size
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
            shadows: 0,
        }
    }

    pub(super) fn add_region(&mut self, base: Address, size: u64, kind: usize, plain: bool) -> usize {
        let shift = GRANULE_SHIFT[kind];
        let entries = size.div_ceil(1 << shift) as usize;
        let (table, marks) = (vec![0; entries], vec![Cell::new(0); entries.div_ceil(64)]);
        let region = Region { base, size, kind, used: 0, plain, shift, table, marks };
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
            pages: Vec::new(),
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
        (region.table, region.marks) = (Vec::new(), Vec::new());
    }

    /// What starts in the address's granule.
    #[inline]
    pub(super) fn find(&self, at: Address) -> Found {
        let entry = self
            .regions
            .iter()
            .find(|region| region.contains(at))
            .and_then(|region| region.table.get(region.granule(at)));
        entry.map_or(Found::Nothing, |&entry| decode(entry))
    }

    /// Where the table says what starts in the address's granule; none if it lies in no region.
    #[inline(always)]
    pub(super) fn entry(&mut self, at: Address) -> Option<&mut u32> {
        let region = self.regions.iter_mut().find(|region| region.contains(at))?;
        let granule = region.granule(at);
        region.table.get_mut(granule)
    }

    /// What starts in the segment in the address's granule or, failing that, in the nearest before it;
    /// with `strictly` only before it.
    pub(super) fn find_before(&self, segment: u16, at: Address, strictly: bool) -> Found {
        let segment = &self.segments[segment as usize];
        let region = &self.regions[segment.region as usize];
        let (first, mut end) = (region.granule(segment.base), region.granule(at) + usize::from(!strictly));
        while end > first {
            let word = (end - 1) / 64;
            let marks = &region.marks[word];
            let below = marks.get() & (u64::MAX >> (64 * (word + 1) - end));
            if below == 0 {
                end = 64 * word;
                continue;
            }
            let bit = below.ilog2() as usize;
            end = 64 * word + bit;
            if end < first {
                break;
            }
            if region.table[end] != 0 {
                return decode(region.table[end]);
            }
            marks.set(marks.get() & !(1 << bit));
        }
        Found::Nothing
    }

    /// What the table says of each granule of a segment, as far as memory was ever mapped there.
    pub(super) fn named_in(&self, segment: u16) -> impl Iterator<Item = (Range<Address>, Found)> {
        let segment = &self.segments[segment as usize];
        let region = &self.regions[segment.region as usize];
        let size = if segment.plain { segment.size } else { segment.used() };
        let first = region.granule(segment.base);
        let entries = region.table[first..].iter().take(size.div_ceil(1 << region.shift) as usize);
        (segment.base..)
            .step_by(1 << region.shift)
            .zip(entries)
            .map(|(at, &entry)| (at..at + (1 << region.shift), decode(entry)))
    }

    #[inline]
    pub(super) fn set_block(&mut self, region: u16, at: Address, id: Id) {
        let region = &mut self.regions[region as usize];
        let granule = region.granule(at);
        region.table[granule] = id << 1;
        region.mark(granule);
    }

    #[inline]
    pub(super) fn clear(&mut self, region: u16, at: Address) {
        let region = &mut self.regions[region as usize];
        let granule = region.granule(at);
        region.table[granule] = 0;
    }

    /// Names a slab in every granule whose start lies in it, or clears them.
    pub(super) fn set_slab(&mut self, segment: u16, at: Address, size: u64, slab: Option<u32>) {
        let index = self.segments[segment as usize].region;
        let region = &mut self.regions[index as usize];
        let value = slab.map_or(0, |slab| slab << 1 | 1);
        let first = (at - region.base).div_ceil(1 << region.shift) as usize;
        let last = ((at - region.base + size - 1) >> region.shift) as usize;
        region.table[first..=last].fill(value);
        if slab.is_some() {
            (first..=last).for_each(|granule| region.mark(granule));
        }
    }

    /// The handle that is mapped at an address, present there or not.
    #[inline]
    fn mapped_at(&self, segment: u16, at: Address) -> Option<(HandleId, &Held)> {
        let segment = &self.segments[segment as usize];
        let id = segment.pages.get(segment.page(at))?.handle.checked_sub(1)?;
        self.handles[id as usize].as_ref().map(|held| (id, held))
    }

    /// The handle that is present at an address.
    #[inline]
    pub(super) fn piece_at(&self, segment: u16, at: Address) -> Option<(HandleId, Piece)> {
        let (id, held) = self.mapped_at(segment, at)?;
        let piece = held.piece;
        (piece.segment == segment && at.wrapping_sub(piece.at) < piece.size).then_some((id, piece))
    }

    /// The handle that has a shadow at an address, with the shadow.
    pub(super) fn shadow_at(&self, segment: u16, at: Address) -> Option<(HandleId, Piece, Shadow)> {
        let (id, held) = self.mapped_at(segment, at)?;
        let entry = &self.segments[segment as usize];
        let page = entry.page(at);
        let Page { before, clock, .. } = entry.pages[page];
        let at = entry.base + (page as u64 - u64::from(before)) * PAGE;
        let present = (held.piece.segment, held.piece.at) == (segment, at);
        (!present).then_some((id, held.piece, Shadow { at, segment, clock }))
    }

    /// Whether a handle is mapped at an address, present or not.
    pub(super) fn is_mapped(&self, segment: u16, at: Address) -> bool {
        let segment = &self.segments[segment as usize];
        segment.pages.get(segment.page(at)).is_some_and(|page| page.handle != 0)
    }

    /// Bytes from an address on, at most `most`, in which nothing is mapped.
    pub(super) fn empty_from(&self, segment: u16, at: Address, most: u64) -> u64 {
        let segment = &self.segments[segment as usize];
        let mut pages = segment.pages.iter().skip(segment.page(at)).take((most / PAGE) as usize);
        let used = pages.position(|page| page.handle != 0).map(|place| place as u64 * PAGE);
        used.unwrap_or(most.min(segment.end() - at))
    }

    /// Bytes of physical memory that segments have.
    pub(super) fn mapped_in(&self, segments: &[u16]) -> u64 {
        segments.iter().map(|&segment| self.segments[segment as usize].mapped).sum()
    }

    /// The end of the highest page of a segment that was ever mapped.
    pub(super) fn highest(&self, segment: u16) -> Address {
        let segment = &self.segments[segment as usize];
        segment.base + segment.used()
    }

    /// The handle that is mapped at an address, present or not, and the clock of its shadow there, if it is one; and the end
    /// of the pages of which that is true, `to` at most where nothing is mapped.
    #[inline]
    pub(super) fn stretch(
        &self,
        segment: u16,
        at: Address,
        to: Address,
    ) -> (Option<(HandleId, u64)>, Address) {
        let segment = &self.segments[segment as usize];
        let page = segment.page(at);
        let Some(&Page { handle, behind, clock, .. }) = segment.pages.get(page) else { return (None, to) };
        if handle != 0 {
            let until = at + (1 + u64::from(behind)) * PAGE;
            return (Some((handle - 1, clock)), until.min(to));
        }
        let mut rest = segment.pages[page + 1..].iter().take(((to - at) / PAGE) as usize - 1);
        let used = rest.position(|page| page.handle != 0).map(|place| at + (1 + place as u64) * PAGE);
        (None, used.unwrap_or(to))
    }

    pub(super) fn piece(&self, id: HandleId) -> Option<Piece> {
        self.handles[id as usize].as_ref().map(|held| held.piece)
    }

    /// The shadows of a handle.
    pub(super) fn shadows_of(&self, id: HandleId) -> &[Shadow] {
        self.handles[id as usize].as_ref().map_or(&[], |held| &held.shadows)
    }

    /// Notes that a handle is idle, and in which survey that was found.
    pub(super) fn note_idle(&mut self, id: HandleId, survey: u64) {
        if let Some(held) = &mut self.handles[id as usize] {
            held.surveyed = survey;
        }
    }

    /// Notes that requests to come will want the handles that are mapped in a range.
    pub(super) fn note_wanted(&mut self, segment: u16, from: Address, to: Address, survey: u64) {
        let (mut at, to) = (from / PAGE * PAGE, to.next_multiple_of(PAGE));
        while at < to {
            let (mapped, until) = self.stretch(segment, at, to);
            if let Some(held) = mapped.and_then(|(id, _)| self.handles[id as usize].as_mut()) {
                held.wanted = survey;
            }
            at = until;
        }
    }

    #[inline]
    pub(super) fn is_wanted(&self, id: HandleId, survey: u64) -> bool {
        self.handles[id as usize].as_ref().is_some_and(|held| held.wanted == survey)
    }

    #[inline]
    pub(super) fn is_idle(&self, id: HandleId, survey: u64) -> bool {
        self.handles[id as usize].as_ref().is_some_and(|held| held.surveyed == survey)
    }

    /// Counts a handle in; false if it was counted in this search already.
    pub(super) fn count_in(&mut self, id: HandleId, search: u64) -> bool {
        match &mut self.handles[id as usize] {
            Some(held) if held.counted != search => {
                held.counted = search;
                true
            }
            _ => false,
        }
    }

    /// Writes down that a new handle is mapped and present.
    pub(super) fn place(&mut self, piece: Piece) {
        let id = match self.vacant.pop() {
            Some(id) => id,
            None => {
                self.handles.push(None);
                (self.handles.len() - 1) as HandleId
            }
        };
        self.handles[id as usize] =
            Some(Held { piece, shadows: Vec::new(), surveyed: 0, counted: 0, wanted: 0 });
        self.name(piece.segment, piece.at, piece.size, id + 1);
        self.segments[piece.segment as usize].mapped += piece.size;
    }

    /// Names a handle (plus one), or none, in the pages where it is mapped.
    fn name(&mut self, segment: u16, at: Address, size: u64, handle: u32) {
        let segment = &mut self.segments[segment as usize];
        let (first, count) = (segment.page(at), (size / PAGE) as usize);
        let last = segment.pages.len().max(first + count);
        segment.pages.resize(last, Page::default());
        for (part, page) in segment.pages[first..first + count].iter_mut().enumerate() {
            (page.handle, page.before, page.behind) = (handle, part as u8, (count - 1 - part) as u8);
        }
    }

    /// Writes down that a handle without shadows is mapped no more.
    pub(super) fn displace(&mut self, id: HandleId) {
        if let Some(Held { piece, .. }) = self.handles[id as usize].take() {
            self.name(piece.segment, piece.at, piece.size, 0);
            self.segments[piece.segment as usize].mapped -= piece.size;
            self.vacant.push(id);
        }
    }

    /// Writes down that a handle is now present elsewhere, where it is mapped (as a shadow or just now), and
    /// has a shadow where it was; its size.
    pub(super) fn shift(&mut self, id: HandleId, segment: u16, at: Address, clock: u64) -> u64 {
        let Some(held) = &mut self.handles[id as usize] else { return 0 };
        let Piece { at: old, segment: from, size, .. } = held.piece;
        // The oldest shadow comes first: where the job repeats itself, it is the one that comes back.
        let back = held.shadows.iter().position(|shadow| (shadow.segment, shadow.at) == (segment, at));
        if let Some(place) = back {
            held.shadows.remove(place);
        }
        held.shadows.push(Shadow { at: old, segment: from, clock });
        self.shadows += usize::from(back.is_none());
        let left = &mut self.segments[from as usize];
        let (first, count) = (left.page(old), (size / PAGE) as usize);
        left.pages[first..first + count].iter_mut().for_each(|page| page.clock = clock);
        (held.piece.at, held.piece.segment) = (at, segment);
        self.segments[from as usize].mapped -= size;
        self.segments[segment as usize].mapped += size;
        if back.is_none() {
            self.name(segment, at, size, id + 1);
        }
        size
    }

    /// Whether a handle has a shadow in a segment.
    pub(super) fn has_shadows(&self, segment: u16) -> bool {
        self.pieces().any(|(_, _, shadows)| shadows.iter().any(|shadow| shadow.segment == segment))
    }

    /// Notes that every shadow in a segment is quiet.
    pub(super) fn reset_clocks(&mut self, segment: u16) {
        let shadows = self.handles.iter_mut().flatten().flat_map(|held| &mut held.shadows);
        shadows.filter(|shadow| shadow.segment == segment).for_each(|shadow| shadow.clock = 0);
        self.segments[segment as usize].pages.iter_mut().for_each(|page| page.clock = 0);
    }

    /// Writes down that a shadow is mapped no more.
    pub(super) fn fade(&mut self, id: HandleId, shadow: Shadow) {
        let Some(held) = &mut self.handles[id as usize] else { return };
        let size = held.piece.size;
        held.shadows.retain(|other| (other.segment, other.at) != (shadow.segment, shadow.at));
        self.shadows -= 1;
        self.name(shadow.segment, shadow.at, size, 0);
    }

    /// Pages where something is mapped. Takes time in proportion to the addresses in use.
    pub(super) fn named(&self) -> u64 {
        let pages = |segment: &Segment| segment.pages.iter().filter(|page| page.handle != 0).count() as u64;
        self.segments.iter().filter(|segment| !segment.plain).map(pages).sum()
    }

    /// Every handle with its shadows.
    pub(super) fn pieces(&self) -> impl Iterator<Item = (HandleId, Piece, &[Shadow])> {
        self.handles.iter().enumerate().filter_map(|(id, held)| {
            held.as_ref().map(|held| (id as HandleId, held.piece, held.shadows.as_slice()))
        })
    }
}

/// What an entry of a region's table names: a slab, or else a block, which is none in an empty entry.
#[inline(always)]
pub(super) fn named_by(entry: u32) -> (bool, u32) {
    (entry & 1 == 1, entry >> 1)
}

fn decode(entry: u32) -> Found {
    match named_by(entry) {
        (true, slab) => Found::Slab(slab),
        (false, 0) => Found::Nothing,
        (false, block) => Found::Block(block),
    }
}

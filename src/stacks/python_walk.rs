//! Walks the own thread's Python frames by offsets, without the GIL, and names a frame by reading its
//! code object.
//!
//! Must not know how the layout was found, nor what becomes of the frames. Why it is sound: while a
//! thread is inside C code, nobody else pushes or pops *its* frames, a frame keeps its code object alive,
//! and a code object its strings and line table. So a thread may read its own chain whether or not it
//! holds the GIL. Invariant: the walk is bounded however odd the chain is, and reads nothing through a
//! pointer that cannot be one.

use super::lines::line_at;
use super::python_layout::{BYTES_DATA, BYTES_LENGTH, Chain, Layout, OBJECT_TYPE, TextOffsets};
use super::python_reuse::deaths;
use super::raw::{RawFrame, fold};

/// From this owner on a frame belongs to the interpreter's C code and has no Python code to show.
const OWNED_BY_C: u8 = 3;
/// Longest file or function name that is copied, in characters.
const LONGEST_TEXT: u64 = 4096;
/// Longest line table that is looked through, in bytes (the standard library's longest has 60 KB).
const LONGEST_TABLE: u64 = 1 << 22;

/// How memory is read: directly on the hot path, or through the kernel while it is not yet known that
/// the layout is true.
pub trait Memory {
    /// The eight bytes at `address`.
    ///
    /// # Safety
    /// For [`Direct`], the bytes must be mapped.
    unsafe fn word(&self, address: u64) -> Option<u64>;
    /// `length` bytes at `address`, appended to `out`.
    ///
    /// # Safety
    /// As for [`Memory::word`].
    unsafe fn bytes(&self, address: u64, length: usize, out: &mut Vec<u8>) -> bool;
}

/// Plain loads.
pub struct Direct;

impl Memory for Direct {
    #[inline(always)]
    unsafe fn word(&self, address: u64) -> Option<u64> {
        // SAFETY: the caller promises that the eight bytes are mapped; unaligned is allowed.
        Some(unsafe { (address as *const u64).read_unaligned() })
    }

    unsafe fn bytes(&self, address: u64, length: usize, out: &mut Vec<u8>) -> bool {
        // SAFETY: the caller promises that the bytes are mapped, and they are bytes.
        out.extend_from_slice(unsafe { std::slice::from_raw_parts(address as *const u8, length) });
        true
    }
}

/// Loads through a pipe: the kernel answers EFAULT where a plain load would end the process.
pub struct Checked {
    read: i32,
    write: i32,
}

impl Checked {
    pub fn new() -> Option<Checked> {
        let mut ends = [0i32; 2];
        // SAFETY: pipe2 fills the two ints that it is given.
        let made = unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) };
        (made == 0).then(|| Checked { read: ends[0], write: ends[1] })
    }

    fn copy(&self, address: u64, into: &mut [u8]) -> bool {
        for (index, chunk) in into.chunks_mut(2048).enumerate() {
            let from = address.wrapping_add(index as u64 * 2048);
            // SAFETY: write reports EFAULT for an unmapped source instead of faulting.
            let sent = unsafe { libc::write(self.write, from as *const libc::c_void, chunk.len()) };
            if sent <= 0 {
                return false;
            }
            // SAFETY: the chunk is writable for its length and `sent` never exceeds that.
            let got = unsafe { libc::read(self.read, chunk.as_mut_ptr().cast(), sent as usize) };
            if got != chunk.len() as isize {
                return false;
            }
        }
        true
    }
}

impl Drop for Checked {
    fn drop(&mut self) {
        // SAFETY: both ends were opened by `new` and nothing else closes them.
        unsafe {
            libc::close(self.read);
            libc::close(self.write);
        }
    }
}

impl Memory for Checked {
    unsafe fn word(&self, address: u64) -> Option<u64> {
        let mut word = [0; 8];
        self.copy(address, &mut word).then(|| u64::from_ne_bytes(word))
    }

    unsafe fn bytes(&self, address: u64, length: usize, out: &mut Vec<u8>) -> bool {
        let start = out.len();
        out.resize(start + length, 0);
        self.copy(address, &mut out[start..])
    }
}

/// What a walk found.
#[derive(Clone, Copy, Debug, Default)]
pub struct Walked {
    pub frames: usize,
    pub hash: u64,
}

/// An address that a heap object or a frame could have: canonical, not in the first page, aligned.
#[inline(always)]
fn plausible(address: u64) -> bool {
    address.wrapping_sub(4096) < (1 << 47) - 4096 && address & 7 == 0
}

/// Writes the innermost `depth` frames of the thread whose state is at `thread` to `out` (which must hold
/// one more: the marker for what was cut off).
///
/// # Safety
/// `thread` is the calling thread's `PyThreadState`, and `layout` is true for this interpreter or
/// `memory` is [`Checked`].
#[inline]
pub unsafe fn walk<M: Memory>(
    memory: &M,
    layout: &Layout,
    thread: u64,
    depth: usize,
    out: &mut [RawFrame],
) -> Walked {
    // SAFETY: the caller's promise, passed on; every address is checked with `plausible` before use.
    unsafe {
        match layout.chain {
            Chain::FrameObjects { thread_frame, lasti_scale } => {
                let first = memory.word(thread + u64::from(thread_frame)).unwrap_or(0);
                walk_frame_objects(memory, layout, first, lasti_scale, depth, out)
            }
            Chain::ThroughCFrame { thread_cframe, cframe_frame } => {
                let cframe = memory.word(thread + u64::from(thread_cframe)).unwrap_or(0);
                let first = if plausible(cframe) {
                    memory.word(cframe + u64::from(cframe_frame)).unwrap_or(0)
                } else {
                    0
                };
                walk_frames(memory, layout, first, depth, out)
            }
            Chain::Direct { thread_frame } => {
                let first = memory.word(thread + u64::from(thread_frame)).unwrap_or(0);
                walk_frames(memory, layout, first, depth, out)
            }
        }
    }
}

/// Adds one frame to `out`; says whether there is room for another.
#[inline(always)]
fn keep(walked: &mut Walked, out: &mut [RawFrame], depth: usize, frame: RawFrame) -> bool {
    let (frame, more) = if walked.frames < depth { (frame, true) } else { (RawFrame::cut(), false) };
    let Some(slot) = out.get_mut(walked.frames) else { return false };
    *slot = frame;
    walked.hash = fold(walked.hash, frame.mix());
    walked.frames += 1;
    more
}

/// 3.11 and later.
#[inline(always)]
unsafe fn walk_frames<M: Memory>(
    memory: &M,
    layout: &Layout,
    first: u64,
    depth: usize,
    out: &mut [RawFrame],
) -> Walked {
    let mut walked = Walked::default();
    let mut frame = first;
    // The interpreter's own frames are passed over, so there are more steps than frames; still bounded.
    for _ in 0..depth * 4 + 64 {
        if !plausible(frame) {
            break;
        }
        // SAFETY: `frame` is the thread's own live frame (or `memory` survives that it is not); the owner
        // byte is read as the low byte of a word, which lies within the frame or its first local.
        let (executable, previous, instruction, owner) = unsafe {
            (
                memory.word(frame + u64::from(layout.frame.code)).unwrap_or(0),
                memory.word(frame + u64::from(layout.frame.previous)).unwrap_or(0),
                memory.word(frame + u64::from(layout.frame.instruction)).unwrap_or(0),
                memory.word(frame + u64::from(layout.frame.owner)).unwrap_or(0) as u8,
            )
        };
        // 3.14 tags the low bits of the reference.
        let code = executable & !7;
        if owner < OWNED_BY_C && plausible(code) {
            let offset = instruction.wrapping_sub(code + u64::from(layout.code.instructions)) as i32;
            // SAFETY: a frame keeps its code object alive.
            let print = unsafe { fingerprint(memory, layout, code) };
            if !keep(&mut walked, out, depth, RawFrame::python(code, offset, print)) {
                break;
            }
        }
        frame = previous;
    }
    walked
}

/// 3.9 and 3.10.
#[inline(always)]
unsafe fn walk_frame_objects<M: Memory>(
    memory: &M,
    layout: &Layout,
    first: u64,
    lasti_scale: i32,
    depth: usize,
    out: &mut [RawFrame],
) -> Walked {
    let mut walked = Walked::default();
    let mut frame = first;
    for _ in 0..depth + 1 {
        if !plausible(frame) {
            break;
        }
        // SAFETY: as in `walk_frames`; the instruction is an int, read as the low half of a word.
        let (code, previous, last) = unsafe {
            (
                memory.word(frame + u64::from(layout.frame.code)).unwrap_or(0),
                memory.word(frame + u64::from(layout.frame.previous)).unwrap_or(0),
                memory.word(frame + u64::from(layout.frame.instruction)).unwrap_or(0) as i32,
            )
        };
        if !plausible(code) {
            break;
        }
        // SAFETY: a frame keeps its code object alive.
        let print = unsafe { fingerprint(memory, layout, code) };
        let offset = last.wrapping_mul(lasti_scale);
        if !keep(&mut walked, out, depth, RawFrame::python(code, offset, print)) {
            break;
        }
        frame = previous;
    }
    walked
}

/// Tells apart code objects that were given the same address one after the other: by their own number
/// where they have one (3.12 and later), else by the deaths that were counted at the address.
///
/// # Safety
/// `code` is a live code object, or `memory` is [`Checked`].
#[inline(always)]
unsafe fn fingerprint<M: Memory>(memory: &M, layout: &Layout, code: u64) -> u32 {
    let Some(version) = layout.code.version else { return deaths(code) };
    // SAFETY: the offsets lie within a code object.
    unsafe {
        let word = |offset: u32| memory.word(code + u64::from(offset)).unwrap_or(0) as u32;
        let version = word(version);
        // Zero once four billion code objects were made: then the table's address must do.
        if version != 0 { version } else { word(layout.code.line_table) }
    }
}

/// The addresses of the types that [`name`] expects, so that it never decodes something else.
#[derive(Clone, Copy, Debug)]
pub struct Types {
    pub code: u64,
    pub text: u64,
    pub bytes: u64,
}

/// A Python frame in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub file: String,
    pub function: String,
    pub line: u32,
}

/// File, function and line of a frame; `None` for a frame that has not begun to run Python code yet, or
/// whose parts are not what they should be.
///
/// # Safety
/// `frame` is on the calling thread's chain at this moment and `layout` true, or `memory` is [`Checked`].
pub unsafe fn name<M: Memory>(memory: &M, layout: &Layout, types: &Types, frame: RawFrame) -> Option<Named> {
    let code = frame.place;
    // SAFETY: the frame keeps its code object alive, and that its strings and tables; each object's type
    // is compared before its contents are read.
    unsafe {
        if !plausible(code) || memory.word(code + OBJECT_TYPE)? != types.code {
            return None;
        }
        if layout.code.instructions != 0 {
            let units = memory.word(code + u64::from(layout.code.first_traceable))? as i32;
            // What the interpreter itself calls an incomplete frame. (A generator's frame counts as
            // complete before that point, but no C code is called there that could see it.)
            if frame.offset() < units.saturating_mul(2) {
                return None;
            }
        }
        let first_line = memory.word(code + u64::from(layout.code.first_line))? as i32;
        let table = memory.word(code + u64::from(layout.code.line_table))?;
        if !plausible(table) || memory.word(table + OBJECT_TYPE)? != types.bytes {
            return None;
        }
        let mut packed = Vec::new();
        let length = memory.word(table + BYTES_LENGTH)?.min(LONGEST_TABLE);
        if !memory.bytes(table + BYTES_DATA, length as usize, &mut packed) {
            return None;
        }
        let line = line_at(layout.lines, &packed, first_line, frame.offset()).unwrap_or(first_line);
        let text = |at: u32| {
            let address = memory.word(code + u64::from(at))?;
            text(memory, &layout.text, types, address)
        };
        Some(Named {
            file: text(layout.code.filename)?,
            function: text(layout.code.function)?,
            line: u32::try_from(line).unwrap_or(0),
        })
    }
}

/// The contents of a compact `str` (every string that the compiler makes is one).
///
/// # Safety
/// As for [`name`].
pub unsafe fn text<M: Memory>(
    memory: &M,
    offsets: &TextOffsets,
    types: &Types,
    address: u64,
) -> Option<String> {
    // SAFETY: the type is compared first; the length and the width of a character are the string's own.
    unsafe {
        if !plausible(address) || memory.word(address + OBJECT_TYPE)? != types.text {
            return None;
        }
        let state = (memory.word(address + u64::from(offsets.state))? as u32) >> offsets.kind_shift;
        let (width, compact, ascii) = ((state & 7) as usize, state & 8 != 0, state & 16 != 0);
        if !compact || !matches!(width, 1 | 2 | 4) {
            return None;
        }
        let length = memory.word(address + u64::from(offsets.length))?.min(LONGEST_TEXT) as usize;
        let data = address + u64::from(if ascii { offsets.ascii_data } else { offsets.compact_data });
        let mut raw = Vec::new();
        if !memory.bytes(data, length * width, &mut raw) {
            return None;
        }
        let letter = |code: u32| char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
        Some(match width {
            1 => raw.iter().map(|byte| char::from(*byte)).collect(),
            2 => raw
                .chunks_exact(2)
                .map(|pair| letter(u16::from_ne_bytes([pair[0], pair[1]]).into()))
                .collect(),
            _ => raw
                .chunks_exact(4)
                .map(|four| letter(u32::from_ne_bytes([four[0], four[1], four[2], four[3]])))
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stacks::python_layout::built_in;

    #[test]
    fn checked_memory_survives_what_is_not_mapped() {
        let memory = Checked::new().unwrap();
        let value = 0x1234_5678_9abc_def0u64;
        // SAFETY: Checked needs no promise.
        unsafe {
            assert_eq!(memory.word(&raw const value as u64), Some(value));
            assert_eq!(memory.word(0), None);
            assert_eq!(memory.word(0x7fff_ffff_f000), None);
            let long = vec![7u8; 10_000];
            let mut copy = Vec::new();
            assert!(memory.bytes(long.as_ptr() as u64, long.len(), &mut copy));
            assert_eq!(copy, long);
        }
    }

    /// A frame that is its own caller must end the walk, and so must a chain into nowhere.
    #[test]
    fn an_odd_chain_is_bounded() {
        let memory = Checked::new().unwrap();
        for minor in 9..=14 {
            let layout = built_in(minor).unwrap();
            let mut thread = [0u64; 64];
            let mut frame = [0u64; 64];
            let code = [0u64; 64];
            let at = frame.as_ptr() as u64;
            frame[layout.frame.previous as usize / 8] = at;
            frame[layout.frame.code as usize / 8] = code.as_ptr() as u64;
            match layout.chain {
                Chain::FrameObjects { thread_frame, .. } | Chain::Direct { thread_frame } => {
                    thread[thread_frame as usize / 8] = at;
                }
                Chain::ThroughCFrame { thread_cframe, cframe_frame } => {
                    frame[60] = at;
                    thread[thread_cframe as usize / 8] = at + 480 - u64::from(cframe_frame);
                }
            }
            let mut out = [RawFrame::default(); 9];
            // SAFETY: Checked needs no promise.
            let walked = unsafe { walk(&memory, &layout, thread.as_ptr() as u64, 8, &mut out) };
            assert_eq!(walked.frames, 9);
            assert!(out[8].is_cut() && !out[7].is_cut());
            assert_eq!(walked.hash, crate::stacks::raw::hash(&out));
            frame[layout.frame.previous as usize / 8] = 0x1000_0000_0000;
            // SAFETY: as above.
            let walked = unsafe { walk(&memory, &layout, thread.as_ptr() as u64, 8, &mut out) };
            // The unmapped caller has, read as zeros, no code.
            assert_eq!(walked.frames, 1);
        }
    }
}

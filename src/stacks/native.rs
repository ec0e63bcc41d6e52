//! Native frames of the own thread: framehop on x86-64, the C runtime's unwinder elsewhere.
//!
//! Must not know Python, nor any name: a frame is a return address. Invariant: nothing is allocated while
//! unwinding, and nothing outside the thread's own stack is read as stack, however corrupt it is.

use super::raw::RawFrame;

/// One thread's part: the list of shared objects that it last saw, framehop's cache of unwind rules, and
/// the bounds of its stack.
#[derive(Default)]
pub struct Unwinder {
    #[cfg(target_arch = "x86_64")]
    fast: fast::Fast,
}

/// Where to stop: native frames from this range of code on are of no interest.
pub type Until = std::ops::Range<u64>;

/// What a walk to the end of the stack found.
#[derive(Debug, PartialEq, Eq)]
pub enum Walked {
    /// The frames of a walk that was made before: what [`Unwinder::remember`] was told of it.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
    Known(u32),
    /// So many frames.
    Frames(usize),
}

impl Unwinder {
    pub fn new() -> Unwinder {
        Unwinder::default()
    }

    /// Writes the innermost `depth` return addresses to `out`, and the marker if there are more (`out`
    /// has room for one more than `depth`). Ends before the first frame in `until`.
    pub fn walk(&mut self, depth: usize, until: &Until, out: &mut [RawFrame]) -> usize {
        #[cfg(target_arch = "x86_64")]
        if let Walked::Frames(frames @ 1..) = self.fast.walk(depth, until, out, false) {
            return frames;
        }
        runtime::walk(depth, until, out)
    }

    /// As [`walk`](Self::walk), to the end of the stack, unless the walk is known. The depth is the same each time.
    #[inline]
    pub fn walk_or_recall(&mut self, depth: usize, out: &mut [RawFrame]) -> Walked {
        #[cfg(target_arch = "x86_64")]
        {
            let walked = self.fast.walk(depth, &(0..0), out, true);
            if walked != Walked::Frames(0) {
                return walked;
            }
        }
        Walked::Frames(runtime::walk(depth, &(0..0), out))
    }

    /// What the last [`walk_or_recall`](Self::walk_or_recall) stands for, if it had to be made.
    pub fn remember(&mut self, stands_for: u32) {
        #[cfg(target_arch = "x86_64")]
        self.fast.remember(stands_for);
        #[cfg(not(target_arch = "x86_64"))]
        let _ = stands_for;
    }
}

/// Adds an address; says whether there is room for another.
#[inline(always)]
fn keep(frames: &mut usize, depth: usize, address: u64, until: &Until, out: &mut [RawFrame]) -> bool {
    if until.contains(&address) {
        return false;
    }
    let Some(slot) = out.get_mut(*frames) else { return false };
    let more = *frames < depth;
    *slot = if more { RawFrame::native(address) } else { RawFrame::cut() };
    *frames += 1;
    more
}

#[cfg(target_arch = "x86_64")]
mod fast {
    use std::arch::asm;
    use std::ops::Range;
    use std::sync::Arc;

    use framehop::x86_64::{CacheX86_64, UnwindRegsX86_64};
    use framehop::{FrameAddress, MustNotAllocateDuringUnwind, Unwinder as _};

    use super::super::native_modules::{Modules, counters, current};
    use super::super::native_paths::{Outcome, Paths, Reads, Record, Registers, change};
    use super::super::raw::RawFrame;
    use super::{Until, Walked, keep};

    /// Stack that framehop may need: its cache is made there before it is moved to the heap.
    const ROOM: u64 = 512 << 10;

    type Cache = CacheX86_64<MustNotAllocateDuringUnwind>;

    #[derive(Default)]
    pub struct Fast {
        modules: Option<Arc<Modules>>,
        cache: Option<Box<Cache>>,
        /// Another for steps that are made again with something changed: what fails is remembered there, too.
        trial: Option<Box<Cache>>,
        /// The thread's stack; it grows from the end to the start. Empty until it was asked for.
        stack: Range<u64>,
        paths: Paths,
        record: Option<Record>,
        /// The stack pointer of the walk that `record` holds, until it is remembered.
        recorded: Option<u64>,
    }

    /// Twice the depth covers our own frames, which are left out; a loop in a corrupt stack ends.
    fn most_steps(depth: usize) -> usize {
        depth * 2 + 16
    }

    impl Fast {
        /// No frames where framehop cannot be used. `by_memory`: whether a walk that was made before will do.
        #[inline(never)]
        pub fn walk(&mut self, depth: usize, until: &Until, out: &mut [RawFrame], by_memory: bool) -> Walked {
            let (ip, sp, bp): (u64, u64, u64);
            // SAFETY: reads three registers into others; no memory, no flags, no stack.
            unsafe {
                asm!("lea {ip}, [rip]", "mov {sp}, rsp", "mov {bp}, rbp",
                     ip = out(reg) ip, sp = out(reg) sp, bp = out(reg) bp,
                     options(nomem, nostack, preserves_flags));
            }
            self.recorded = None;
            if self.stack.is_empty() {
                self.stack = stack();
            }
            // On a coroutine's stack there are no bounds to keep to; on a small one no room for the cache
            // to be made.
            let end = self.stack.end;
            if !self.stack.contains(&sp) || sp - self.stack.start < ROOM {
                return Walked::Frames(0);
            }
            let counters = counters();
            if self.modules.as_ref().is_none_or(|modules| modules.counters != counters) {
                self.modules = Some(current(counters));
                self.cache = Some(Box::new(CacheX86_64::new_in()));
                self.paths.restart();
            }
            let read = |address: u64| {
                if address < sp || address & 7 != 0 || address > end - 8 {
                    return Err(());
                }
                // SAFETY: aligned, and between this frame and the end of the thread's stack, all of which
                // is mapped while the thread runs.
                Ok(unsafe { (address as *const u64).read() })
            };
            if by_memory {
                if let Some(known) = self.paths.find(sp, bp, |address| read(address).unwrap_or(0)) {
                    return Walked::Known(known);
                }
                if self.paths.wants_another() {
                    self.trial.get_or_insert_with(|| Box::new(CacheX86_64::new_in()));
                    self.record.get_or_insert_with(|| Record::new(most_steps(depth))).restart();
                    self.recorded = Some(sp);
                }
            }
            let (Some(modules), Some(cache)) = (&self.modules, &mut self.cache) else {
                return Walked::Frames(0);
            };
            let record = self.record.as_mut().filter(|_| self.recorded.is_some());
            let mut recording = record.zip(self.trial.as_mut());
            let step = |cache: &mut Cache,
                        at: FrameAddress,
                        from: Registers,
                        see: &mut dyn FnMut(u64, u64) -> u64| {
                let mut registers = UnwindRegsX86_64::new(at.address(), from.sp, from.bp);
                let mut read = |address| read(address).map(|value| see(address, value));
                let caller = modules.tables.unwind_frame(at, &mut registers, cache, &mut read);
                let after = Registers { sp: registers.sp(), bp: registers.bp() };
                Outcome { caller: caller.map_err(|_| ()), after }
            };
            let mut registers = Registers { sp, bp };
            let mut at = FrameAddress::from_instruction_pointer(ip);
            let mut frames = 0;
            for _ in 0..most_steps(depth) {
                let address = at.address();
                let own = frames == 0 && address >= modules.own.0 && address < modules.own.1;
                if !own && !keep(&mut frames, depth, address, until, out) {
                    break;
                }
                let mut reads = Reads::default();
                let outcome = step(cache, at, registers, &mut |place, value| {
                    reads.note(place, value);
                    value
                });
                if let Some((record, trial)) = &mut recording {
                    record.step(registers, &reads, outcome, |from, changed| {
                        let mut number = 0;
                        let again = step(trial, at, from, &mut |_, value| {
                            number += 1;
                            if changed == Some(number - 1) { change(value) } else { value }
                        });
                        if again != outcome {
                            ***trial = CacheX86_64::new_in();
                        }
                        again
                    });
                }
                let Ok(Some(caller)) = outcome.caller else { break };
                let Some(next) = FrameAddress::from_return_address(caller) else { break };
                // Callers lie further up, always.
                if outcome.after.sp <= registers.sp {
                    break;
                }
                (at, registers) = (next, outcome.after);
            }
            if frames == 0 {
                self.recorded = None; // the other unwinder's walk rests on other things
            }
            Walked::Frames(frames)
        }

        #[cfg(test)]
        pub fn reload(&mut self) {
            self.modules = None;
        }

        pub fn remember(&mut self, stands_for: u32) {
            if let (Some(sp), Some(record)) = (self.recorded.take(), &self.record) {
                self.paths.keep(sp, record, stands_for);
            }
        }
    }

    /// Where the calling thread's stack lies. Reads /proc/self/maps in the main thread, so it is asked
    /// for once.
    #[cold]
    fn stack() -> Range<u64> {
        // SAFETY: an attribute object that is filled in before it is read, and destroyed.
        unsafe {
            let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
            if libc::pthread_getattr_np(libc::pthread_self(), &raw mut attributes) != 0 {
                return 0..0;
            }
            let (mut start, mut size) = (std::ptr::null_mut(), 0usize);
            let got = libc::pthread_attr_getstack(&raw const attributes, &raw mut start, &raw mut size);
            libc::pthread_attr_destroy(&raw mut attributes);
            let start = start as u64;
            if got == 0 { start..start + size as u64 } else { 0..0 }
        }
    }
}

/// The unwinder that exceptions use: slower by ten, but everywhere.
mod runtime {
    use std::ffi::{c_int, c_void};

    use super::super::raw::RawFrame;
    use super::{Until, keep};

    unsafe extern "C" {
        fn _Unwind_Backtrace(
            each: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
            data: *mut c_void,
        ) -> c_int;
        fn _Unwind_GetIP(context: *mut c_void) -> usize;
    }

    struct Walk<'a> {
        frames: usize,
        depth: usize,
        until: &'a Until,
        out: &'a mut [RawFrame],
    }

    pub fn walk(depth: usize, until: &Until, out: &mut [RawFrame]) -> usize {
        extern "C" fn each(context: *mut c_void, data: *mut c_void) -> c_int {
            const GO_ON: c_int = 0;
            const END_OF_STACK: c_int = 5;
            // SAFETY: `data` is the `Walk` below, and the unwinder lends `context` for the call.
            let (walk, address) = unsafe { (&mut *data.cast::<Walk>(), _Unwind_GetIP(context)) };
            let Walk { frames, depth, until, out } = walk;
            if address != 0 && keep(frames, *depth, address as u64, until, out) {
                GO_ON
            } else {
                END_OF_STACK
            }
        }
        let mut walk = Walk { frames: 0, depth, until, out };
        // SAFETY: `each` matches the declared type, does not unwind, and `walk` outlives the call.
        unsafe { _Unwind_Backtrace(each, (&raw mut walk).cast()) };
        walk.frames
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Until = 0..0;

    #[inline(never)]
    fn down(depth: u32, work: &mut dyn FnMut()) {
        if depth == 0 {
            work();
        } else {
            down(depth - 1, work);
            std::hint::black_box(depth);
        }
    }

    fn addresses(frames: &[RawFrame]) -> Vec<u64> {
        frames.iter().map(|frame| frame.place).collect()
    }

    #[test]
    fn both_unwinders_agree() {
        let mut out = [[RawFrame::default(); 200]; 2];
        let mut counts = [0; 2];
        let mut unwinder = Unwinder::new();
        down(20, &mut || {
            counts[0] = unwinder.walk(100, &ALL, &mut out[0]);
            counts[1] = runtime::walk(100, &ALL, &mut out[1]);
        });
        let (a, b) = (addresses(&out[0][..counts[0]]), addresses(&out[1][..counts[1]]));
        // The innermost few are the unwinders' own, and differ.
        let common = a.iter().rev().zip(b.iter().rev()).take_while(|(a, b)| a == b).count();
        assert!(common >= 24, "{common} common frames\n{a:x?}\n{b:x?}");
    }

    /// A large frame, and one that is aligned more strictly than the stack, and so found by its frame pointer.
    #[inline(never)]
    fn wide(depth: u32, seed: u64, work: &mut dyn FnMut()) {
        let room = std::hint::black_box([seed; 100]);
        descend(depth, seed, work);
        std::hint::black_box(room);
    }

    #[inline(never)]
    fn aligned(depth: u32, seed: u64, work: &mut dyn FnMut()) {
        #[repr(align(128))]
        struct Aligned([u64; 16]);
        let room = std::hint::black_box(Aligned([seed; 16]));
        descend(depth, seed, work);
        std::hint::black_box(room.0[0]);
    }

    /// What a C function passes on to [`on`].
    struct Way<'a, 'b>(u32, u64, &'a mut &'b mut dyn FnMut());

    extern "C" fn on(way: *mut libc::c_void) {
        // SAFETY: `called_back` and `odd` pass a `Way`, which nobody else uses meanwhile.
        let way = unsafe { &mut *way.cast::<Way<'_, '_>>() };
        descend(way.0, way.1, *way.2);
    }

    /// Through a library's function.
    #[inline(never)]
    fn called_back(depth: u32, seed: u64, mut work: &mut dyn FnMut()) {
        extern "C" fn compare(key: *const libc::c_void, _: *const libc::c_void) -> libc::c_int {
            on(key.cast_mut());
            0
        }
        let mut way = Way(depth, seed, &mut work);
        // SAFETY: an array of one byte, and a comparison that looks at the key alone.
        unsafe { libc::bsearch((&raw mut way).cast(), [0u8].as_ptr().cast(), 1, 1, Some(compare)) };
    }

    /// Through a frame whose unwind rule is none of the simple ones.
    #[cfg(target_arch = "x86_64")]
    #[inline(never)]
    fn odd(depth: u32, seed: u64, mut work: &mut dyn FnMut()) {
        #[unsafe(naked)]
        unsafe extern "C" fn frame(on: extern "C" fn(*mut libc::c_void), way: *mut libc::c_void) {
            std::arch::naked_asm!(
                ".cfi_startproc",
                "sub rsp, 24",
                ".cfi_adjust_cfa_offset 24",
                "mov [rsp + 8], rbp",
                ".cfi_offset rbp, -24",
                "mov rbp, rsp",
                ".cfi_def_cfa rbp, 32",
                "mov rax, rdi",
                "mov rdi, rsi",
                "call rax",
                "mov rbp, [rsp + 8]",
                ".cfi_def_cfa rsp, 32",
                ".cfi_restore rbp",
                "add rsp, 24",
                ".cfi_adjust_cfa_offset -24",
                "ret",
                ".cfi_endproc",
            )
        }
        let mut way = Way(depth, seed, &mut work);
        // SAFETY: `on` takes what is passed on to it.
        unsafe { frame(on, (&raw mut way).cast()) };
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn odd(depth: u32, seed: u64, work: &mut dyn FnMut()) {
        wide(depth, seed, work);
    }

    /// Goes down by a way that the seed chooses.
    #[inline(never)]
    fn descend(depth: u32, seed: u64, work: &mut dyn FnMut()) {
        let next = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
        match if depth == 0 { 5 } else { next % 5 } {
            4 => odd(depth - 1, next, work),
            0 => wide(depth - 1, next, work),
            1 => aligned(depth - 1, next, work),
            2 => called_back(depth - 1, next, work),
            3 => down(1, &mut || descend(depth - 1, next, work)),
            _ => work(),
        }
    }

    /// Walks by memory on many ways, each time beside an unwinder that knows nothing; how often a walk was known.
    fn recalled(depth: usize, turns: u64) -> u32 {
        let mut unwinder = Unwinder::new();
        let mut kept: Vec<Vec<RawFrame>> = Vec::new();
        let mut recalled = 0;
        for turn in 0..turns {
            let mut found: Vec<(Walked, Vec<RawFrame>)> = Vec::new();
            descend((turn % 7) as u32, turn % 211, &mut || {
                // One place in the code for both, so that the innermost frame is the same.
                for unwinder in [&mut unwinder, &mut Unwinder::new()] {
                    let mut out = [RawFrame::default(); 201];
                    let walked = unwinder.walk_or_recall(depth, &mut out);
                    found.push((walked, out.to_vec()));
                }
            });
            let Walked::Frames(frames) = found[1].0 else { panic!("a new unwinder knows nothing") };
            let made = &found[1].1[..frames];
            match found[0].0 {
                Walked::Known(id) => {
                    recalled += 1;
                    assert_eq!(kept[id as usize], made);
                }
                Walked::Frames(frames) => {
                    assert_eq!(&found[0].1[..frames], made);
                    unwinder.remember(kept.len() as u32);
                    kept.push(made.to_vec());
                }
            }
        }
        recalled
    }

    #[test]
    fn a_walk_that_is_recalled_is_the_walk_that_would_be_made() {
        for depth in [200, 8] {
            let recalled = recalled(depth, 4000);
            assert!(
                recalled > 2000 || cfg!(not(target_arch = "x86_64")),
                "{recalled} of 4000 walks were known"
            );
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn nothing_is_recalled_once_the_loader_has_moved_on() {
        #[inline(never)]
        fn is_known(unwinder: &mut Unwinder) -> bool {
            let walked = unwinder.walk_or_recall(200, &mut [RawFrame::default(); 201]);
            unwinder.remember(7);
            walked == Walked::Known(7)
        }
        let mut unwinder = Unwinder::new();
        // Not unrolled: one place in the code.
        let mut known = |turns: usize| -> Vec<bool> {
            (0..std::hint::black_box(turns)).map(|_| is_known(&mut unwinder)).collect()
        };
        assert_eq!(known(3), [false, true, true]);
        unwinder.fast.reload();
        assert!(!is_known(&mut unwinder));
    }

    #[test]
    fn deep_stacks_are_cut_and_marked() {
        let mut out = [RawFrame::default(); 11];
        let mut frames = 0;
        down(50, &mut || frames = Unwinder::new().walk(10, &ALL, &mut out));
        assert_eq!(frames, 11);
        assert!(out[10].is_cut() && out[..10].iter().all(|frame| frame.is_native()));
    }

    #[test]
    fn the_walk_ends_where_it_is_told() {
        let mut out = [RawFrame::default(); 201];
        let mut whole = 0;
        let mut part = 0;
        let mut cut = [RawFrame::default(); 201];
        down(5, &mut || {
            whole = Unwinder::new().walk(200, &ALL, &mut out);
            let place = out[whole - 3].place;
            part = Unwinder::new().walk(200, &(place..place + 1), &mut cut);
        });
        assert_eq!(part, whole - 3);
    }

    #[test]
    fn a_small_thread_is_enough() {
        std::thread::Builder::new()
            .stack_size(128 << 10)
            .spawn(|| {
                let mut out = [RawFrame::default(); 65];
                // Too small for framehop: the other unwinder serves.
                assert!(Unwinder::new().walk(64, &ALL, &mut out) >= 3);
            })
            .unwrap()
            .join()
            .unwrap();
    }
}

//! What some of Python's objects lead to, and of each object met how many references to it were not met.
//!
//! Most of what the garbage collector knows are the functions and classes of libraries, which no search for a holder
//! comes by. So the Python side begins with what the program itself has names for, and of what it finds there it knows
//! whether it has seen all that refers to it. Must not know whose names they are, what is searched. Invariants: those
//! of `python_objects`: the GIL is held, none of the user's code runs (only `tp_traverse` of what the collector would
//! traverse), no reference is kept but those in the list that is handed over.

use super::abi::guarded;
use super::python_api::{Object, function, holds_lock};
use super::python_boot::symbol;
use super::python_objects::{Api, Kinds, Traverse, type_of};
use foldhash::fast::FixedState;
use hashbrown::{HashMap, HashSet};
use libc::{c_int, c_uint, c_void};

/// Most references that are followed: a program with larger collections is left to the whole index.
const MOST_REFERENCES: usize = 1 << 19;
/// From here on a count of references is that of an object that never dies, and tells nothing.
const IMMORTAL: u32 = 1 << 30;

/// The functions of CPython's C API that are needed besides those of `Api`.
struct More {
    is_tracked: unsafe extern "C" fn(Object) -> c_int,
    append: unsafe extern "C" fn(Object, Object) -> c_int,
    keep: unsafe extern "C" fn(Object),
    /// The types of types and of modules.
    special: [Object; 2],
}

/// The bit of `Kind::classes` that says of objects that they are modules, the second of `More::special`.
const IS_MODULE: u32 = 2;

impl More {
    fn find() -> Option<More> {
        // SAFETY: the documented signatures, the same in every CPython from 3.9 on.
        unsafe {
            Some(More {
                is_tracked: function(c"PyObject_GC_IsTracked")?,
                append: function(c"PyList_Append")?,
                keep: function(c"Py_IncRef")?,
                special: [symbol(c"PyType_Type")?, symbol(c"PyModule_Type")?],
            })
        }
    }

    /// Whether an object counts its references where they are looked for.
    fn counts_references(&self, api: &Api, object: Object) -> bool {
        // SAFETY: `object` is alive, and its reference is given back at once.
        unsafe {
            let before = references(object);
            (self.keep)(object);
            let with_ours = references(object);
            api.let_go(object);
            with_ours == before + 1 && references(object) == before
        }
    }
}

/// How many references to an object there are, in all versions the lower half of its first word.
///
/// # Safety
/// `object` is alive.
unsafe fn references(object: Object) -> u32 {
    // SAFETY: the caller's contract.
    unsafe { object.cast::<u32>().read() }
}

/// What was met, and is going to be gone through.
struct Walk<'a> {
    more: &'a More,
    kinds: Kinds<'a>,
    /// Types that are gone through; others are not, nor modules.
    open: HashSet<usize, FixedState>,
    /// The number of each object met; `CLOSED` for those that are not gone through.
    numbers: HashMap<usize, u32, FixedState>,
    met: Vec<Met>,
    followed: usize,
    most: usize,
}

struct Met {
    object: Object,
    traverse: Traverse,
    /// References to it that were followed.
    references: u32,
}

const CLOSED: u32 = u32::MAX;

impl Walk<'_> {
    /// Follows a reference. None if there are too many, or there is no memory.
    ///
    /// # Safety
    /// The GIL is held and `object` is alive.
    unsafe fn follow(&mut self, object: Object) -> Option<()> {
        self.followed += 1;
        if self.followed > MOST_REFERENCES {
            return None;
        }
        if let Some(&number) = self.numbers.get(&(object as usize)) {
            if let Some(met) = self.met.get_mut(number as usize) {
                met.references += 1;
            }
            return Some(());
        }
        // SAFETY: the caller's contract. What the collector does not track it would not traverse either.
        if unsafe { (self.more.is_tracked)(object) } == 0 {
            return Some(());
        }
        // SAFETY: the object is alive and its layout is known.
        let kind = self.kinds.of(unsafe { type_of(object) })?;
        let is_open = match kind.classes {
            0 => true,
            classes if classes & IS_MODULE != 0 => false,
            _ => self.open.contains(&(object as usize)),
        };
        self.numbers.try_reserve(1).ok()?;
        if !is_open {
            self.numbers.insert(object as usize, CLOSED);
            return Some(());
        }
        if self.met.len() >= self.most {
            return None;
        }
        self.met.try_reserve(1).ok()?;
        self.numbers.insert(object as usize, self.met.len() as u32);
        self.met.push(Met { object, traverse: kind.traverse, references: 1 });
        Some(())
    }
}

unsafe extern "C" fn visit(object: Object, walk: *mut c_void) -> c_int {
    // SAFETY: `reach` passes its own Walk, which nobody else uses meanwhile; what is visited is alive.
    c_int::from(unsafe { (*walk.cast::<Walk<'_>>()).follow(object) }.is_none())
}

/// What Python objects lead to: appended to `found`, the nearest first, and for each of them in `unseen` how many
/// references to it were not met.
///
/// # Safety
/// The GIL is held; `roots`, `types` and `found` are lists, `closed` the addresses of objects.
unsafe fn reach(
    roots: Object,
    types: Object,
    closed: &[usize],
    found: Object,
    unseen: &mut [u8],
) -> Option<usize> {
    let (api, more) = (Api::find()?, More::find()?);
    if cfg!(target_endian = "big") || !holds_lock() {
        return None;
    }
    if !api.has_known_layout(found) || !more.counts_references(&api, found) {
        return None;
    }
    let itself = roots as usize;
    // SAFETY: the caller's contract; nothing changes the lists before they have been read.
    let (roots, types) = unsafe { (api.items(roots)?, api.items(types)?) };
    let mut walk = Walk {
        more: &more,
        kinds: Kinds::new(&api, &more.special),
        open: HashSet::default(),
        numbers: HashMap::default(),
        met: Vec::new(),
        followed: 0,
        most: unseen.len(),
    };
    walk.open.try_reserve(types.len()).ok()?;
    walk.open.extend(types.iter().map(|&kind| kind as usize));
    walk.numbers.try_reserve(closed.len() + 1 + 4 * roots.len()).ok()?;
    walk.numbers.extend(closed.iter().map(|&address| (address, CLOSED)));
    // A root's place in the list is a reference to it, which is followed here and not when the list is met.
    walk.numbers.insert(itself, CLOSED);
    for &root in roots {
        // SAFETY: the list keeps it alive.
        unsafe { walk.follow(root) }?;
    }
    let mut next = 0;
    while let Some(&Met { object, traverse, .. }) = walk.met.get(next) {
        // SAFETY: what the collector does at every collection. Nothing that was met goes while the GIL is held and
        // none of Python's code runs.
        if unsafe { traverse(object, visit, (&raw mut walk).cast()) } != 0 {
            return None;
        }
        next += 1;
    }
    for (met, unseen) in walk.met.iter().zip(unseen) {
        // SAFETY: as above.
        let count = unsafe { references(met.object) };
        let missed = if count >= IMMORTAL { u32::MAX } else { count.saturating_sub(met.references) };
        *unseen = u8::try_from(missed).unwrap_or(u8::MAX);
    }
    for met in &walk.met {
        // SAFETY: as above; the list takes a reference of its own.
        if unsafe { (more.append)(found, met.object) } != 0 {
            api.clear_error();
            return None;
        }
    }
    Some(walk.met.len())
}

/// For the Python side: appends to the list `found` what the objects of the list `roots` lead to, at most `room`
/// objects, and writes for each how many references to it were not met, 255 for more. Modules, types but those of
/// the list `types`, and what lies at the addresses `closed` are not gone through and not in `found`. Returns how many
/// there are, `SIZE_MAX` where this Python does not tell, or there are too many; `found` is then of no use.
///
/// # Safety
/// The GIL is held; the three are lists; there are `count` addresses, and room for `room` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_internal_reach(
    roots: Object,
    types: Object,
    closed: *const usize,
    count: usize,
    found: Object,
    unseen: *mut u8,
    room: c_uint,
) -> usize {
    if closed.is_null() || unseen.is_null() {
        return usize::MAX;
    }
    guarded(usize::MAX, || {
        // SAFETY: the caller's contract.
        unsafe {
            let closed = std::slice::from_raw_parts(closed, count);
            let unseen = std::slice::from_raw_parts_mut(unseen, room as usize);
            reach(roots, types, closed, found, unseen).unwrap_or(usize::MAX)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_python_nothing_is_reached() {
        let (none, mut unseen) = (std::ptr::null_mut(), [0]);
        // SAFETY: no object is looked at where there is no Python.
        let count =
            unsafe { strandline_internal_reach(none, none, [0].as_ptr(), 1, none, unseen.as_mut_ptr(), 1) };
        assert_eq!(count, usize::MAX);
    }
}

//! Where CPython keeps what a walk needs: one table per minor version (x86-64 and aarch64 Linux,
//! default builds; the fields are pointers and ints, so both machines agree).
//!
//! Must not know how memory is read or what the offsets are used for. 3.13 and later publish most of
//! these numbers in `_PyRuntime`; [`from_debug_offsets`] reads them and the table stays as the
//! cross-check. Invariant: a layout is handed out only for a version it was written for; whether it is
//! *true* for this interpreter is for the start-up self-check to find out.

/// How line numbers are packed into the bytes beside the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineFormat {
    /// 3.9: pairs (address step, line step), a line starts where its address is reached.
    Lnotab,
    /// 3.10: PEP 626 pairs, ranges, −128 for "no line".
    Pep626,
    /// 3.11 and later: the location table.
    Locations,
}

/// How the thread state leads to the innermost frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chain {
    /// 3.9, 3.10: `tstate->frame`, a `PyFrameObject`, whose `f_lasti` counts units of `lasti_scale` bytes.
    FrameObjects { thread_frame: u32, lasti_scale: i32 },
    /// 3.11, 3.12: `tstate->cframe->current_frame`.
    ThroughCFrame { thread_cframe: u32, cframe_frame: u32 },
    /// 3.13 and later: `tstate->current_frame`.
    Direct { thread_frame: u32 },
}

/// Offsets within a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameOffsets {
    pub code: u32,
    pub previous: u32,
    /// `f_lasti` (an int) for frame objects, else a pointer into the bytecode.
    pub instruction: u32,
    /// The byte that says who owns the frame; from 3 on it is no Python frame. Unused for frame objects.
    pub owner: u32,
}

/// Offsets within a code object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeOffsets {
    pub first_line: u32,
    pub filename: u32,
    /// `co_qualname` from 3.11 on, `co_name` before.
    pub function: u32,
    pub line_table: u32,
    /// First instruction (3.11 and later; unused for frame objects).
    pub instructions: u32,
    /// `_co_firsttraceable`, an int counting 2-byte units (3.11 and later).
    pub first_traceable: u32,
    /// `co_version`: a number given to no other code object (3.12 and later).
    pub version: Option<u32>,
}

/// Offsets within a `str`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextOffsets {
    pub length: u32,
    pub state: u32,
    /// Bit at which `kind` (3 bits), `compact`, `ascii` follow each other in the state word.
    pub kind_shift: u32,
    pub ascii_data: u32,
    pub compact_data: u32,
}

/// Everything that a walk and the naming of a frame need to know of one interpreter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub minor: u32,
    pub chain: Chain,
    pub frame: FrameOffsets,
    pub code: CodeOffsets,
    pub text: TextOffsets,
    pub lines: LineFormat,
}

/// `ob_type` of any object, `ob_size` and the data of `bytes`: the same in every version here.
pub const OBJECT_TYPE: u64 = 8;
pub const BYTES_LENGTH: u64 = 16;
pub const BYTES_DATA: u64 = 32;

const OLD_TEXT: TextOffsets =
    TextOffsets { length: 16, state: 32, kind_shift: 2, ascii_data: 48, compact_data: 72 };
/// 3.12 dropped `wstr`.
const TEXT: TextOffsets =
    TextOffsets { length: 16, state: 32, kind_shift: 2, ascii_data: 40, compact_data: 56 };

const OLD_CODE: CodeOffsets = CodeOffsets {
    first_line: 40,
    filename: 104,
    function: 112,
    line_table: 120,
    instructions: 0,
    first_traceable: 0,
    version: None,
};

const fn code(first_line: u32, instructions: u32, version: Option<u32>) -> CodeOffsets {
    CodeOffsets {
        first_line,
        filename: 112,
        function: 128,
        line_table: 136,
        instructions,
        first_traceable: instructions - 16,
        version,
    }
}

/// The table for Python 3.`minor`; 3.14's state word is settled by the self-check (see `kind_shifts`).
pub fn built_in(minor: u32) -> Option<Layout> {
    let old = |lasti: u32, scale: i32, lines: LineFormat| Layout {
        minor,
        chain: Chain::FrameObjects { thread_frame: 24, lasti_scale: scale },
        frame: FrameOffsets { code: 32, previous: 24, instruction: lasti, owner: 0 },
        code: OLD_CODE,
        text: OLD_TEXT,
        lines,
    };
    let new = |chain: Chain, frame: FrameOffsets, code: CodeOffsets, text: TextOffsets| Layout {
        minor,
        chain,
        frame,
        code,
        text,
        lines: LineFormat::Locations,
    };
    Some(match minor {
        9 => old(104, 1, LineFormat::Lnotab),
        10 => old(96, 2, LineFormat::Pep626),
        11 => new(
            Chain::ThroughCFrame { thread_cframe: 56, cframe_frame: 8 },
            FrameOffsets { code: 32, previous: 48, instruction: 56, owner: 69 },
            code(72, 184, None),
            OLD_TEXT,
        ),
        12 => new(
            Chain::ThroughCFrame { thread_cframe: 56, cframe_frame: 0 },
            FrameOffsets { code: 0, previous: 8, instruction: 56, owner: 70 },
            code(68, 192, Some(92)),
            TEXT,
        ),
        13 => new(
            Chain::Direct { thread_frame: 72 },
            FrameOffsets { code: 0, previous: 8, instruction: 56, owner: 70 },
            code(68, 200, Some(92)),
            TEXT,
        ),
        14 => new(
            Chain::Direct { thread_frame: 72 },
            FrameOffsets { code: 0, previous: 8, instruction: 56, owner: 74 },
            code(68, 208, Some(92)),
            TEXT,
        ),
        _ => return None,
    })
}

/// Where `kind` may stand in the state word: 3.14 made `interned` 16 bits wide. The self-check keeps the
/// first that reads its strings rightly.
pub fn kind_shifts(minor: u32) -> &'static [u32] {
    if minor >= 14 { &[16, 2] } else { &[2] }
}

/// `_Py_DebugOffsets` begins with these eight bytes (3.13 and later).
pub const COOKIE: u64 = u64::from_le_bytes(*b"xdebugpy");
/// Words of `_Py_DebugOffsets` that [`from_debug_offsets`] may look at.
pub const DEBUG_WORDS: usize = 84;

/// Word numbers within `_Py_DebugOffsets`; they differ between minor versions.
struct Words {
    current_frame: usize,
    frame: usize,
    code: usize,
    text: usize,
    instructions: usize,
}

const WORDS_13: Words = Words { current_frame: 23, frame: 28, code: 34, text: 67, instructions: 43 };
/// 3.14 as released, then as in its betas, which lacked some words.
const WORDS_14: [Words; 2] = [
    Words { current_frame: 26, frame: 31, code: 39, text: 77, instructions: 48 },
    Words { current_frame: 24, frame: 29, code: 36, text: 73, instructions: 45 },
];

/// The layout that the interpreter itself states, checked against `version` (PY_VERSION_HEX) and, field
/// by field where the ABI cannot move within a minor version, against the built-in table.
///
/// # Errors
/// A sentence that says which statement of the interpreter was not understood.
pub fn from_debug_offsets(
    words: &[u64; DEBUG_WORDS],
    version: u64,
    table: &Layout,
) -> Result<Layout, String> {
    if words[0] != COOKIE {
        return Err("_PyRuntime does not begin with the debug-offsets cookie".into());
    }
    if words[1] != version {
        return Err(format!("_PyRuntime states version {:#x}, the interpreter {version:#x}", words[1]));
    }
    if words[2] != 0 {
        return Err("this is a free-threaded build of Python, whose frames cannot be walked safely".into());
    }
    let stated = |places: &Words| -> Option<Layout> {
        let small = |word: usize| u32::try_from(words[word]).ok().filter(|offset| *offset < 4096);
        let instructions = small(places.instructions)?;
        let layout = Layout {
            chain: Chain::Direct { thread_frame: small(places.current_frame)? },
            frame: FrameOffsets {
                previous: small(places.frame + 1)?,
                code: small(places.frame + 2)?,
                instruction: small(places.frame + 3)?,
                owner: small(places.frame + 5)?,
            },
            code: CodeOffsets {
                filename: small(places.code + 1)?,
                function: small(places.code + 3)?,
                line_table: small(places.code + 4)?,
                first_line: small(places.code + 5)?,
                instructions,
                first_traceable: instructions.checked_sub(16)?,
                version: table.code.version,
            },
            text: TextOffsets {
                state: small(places.text + 1)?,
                length: small(places.text + 2)?,
                ascii_data: small(places.text + 3)?,
                compact_data: small(places.text + 3)? + 16,
                kind_shift: table.text.kind_shift,
            },
            ..*table
        };
        Some(layout)
    };
    let places: &[Words] = if table.minor == 13 { std::slice::from_ref(&WORDS_13) } else { &WORDS_14 };
    // A patch release may move the thread state's fields; what frames, code and strings look like is
    // fixed within a minor version, and a word number that is off by one shows up here.
    places
        .iter()
        .filter_map(stated)
        .find(|layout| layout.frame == table.frame && layout.code == table.code && layout.text == table.text)
        .ok_or_else(|| {
            format!("the debug offsets of Python 3.{} differ from those known for it", table.minor)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What an interpreter of that layout would state.
    fn debug_offsets(layout: &Layout, places: &Words, version: u64) -> [u64; DEBUG_WORDS] {
        let mut words = [9999; DEBUG_WORDS];
        (words[0], words[1], words[2]) = (COOKIE, version, 0);
        let Chain::Direct { thread_frame } = layout.chain else { unreachable!() };
        words[places.current_frame] = thread_frame.into();
        words[places.frame + 1] = layout.frame.previous.into();
        words[places.frame + 2] = layout.frame.code.into();
        words[places.frame + 3] = layout.frame.instruction.into();
        words[places.frame + 5] = layout.frame.owner.into();
        words[places.code + 1] = layout.code.filename.into();
        words[places.code + 3] = layout.code.function.into();
        words[places.code + 4] = layout.code.line_table.into();
        words[places.code + 5] = layout.code.first_line.into();
        words[places.instructions] = layout.code.instructions.into();
        words[places.text + 1] = layout.text.state.into();
        words[places.text + 2] = layout.text.length.into();
        words[places.text + 3] = layout.text.ascii_data.into();
        words
    }

    #[test]
    fn a_true_statement_is_taken() {
        for (minor, places) in [(13, &WORDS_13), (14, &WORDS_14[0]), (14, &WORDS_14[1])] {
            let table = built_in(minor).unwrap();
            let version = (3 << 24) | (u64::from(minor) << 16);
            let words = debug_offsets(&table, places, version);
            assert_eq!(from_debug_offsets(&words, version, &table), Ok(table));
        }
    }

    #[test]
    fn the_thread_state_may_move_within_a_minor_version() {
        let table = built_in(13).unwrap();
        let moved = Layout { chain: Chain::Direct { thread_frame: 80 }, ..table };
        let words = debug_offsets(&moved, &WORDS_13, 7);
        assert_eq!(from_debug_offsets(&words, 7, &table), Ok(moved));
    }

    #[test]
    fn a_false_statement_is_declined_with_a_sentence() {
        let table = built_in(13).unwrap();
        let good = debug_offsets(&table, &WORDS_13, 7);
        for (word, value, says) in [
            (0, 1, "cookie"),
            (1, 8, "version"),
            (2, 1, "free-threaded"),
            (WORDS_13.frame + 2, 16, "differ"),
            (WORDS_13.code + 4, 4097, "differ"),
        ] {
            let mut words = good;
            words[word] = value;
            assert!(from_debug_offsets(&words, 7, &table).unwrap_err().contains(says));
        }
    }

    #[test]
    fn unknown_versions_have_no_table() {
        assert!((9..=14).all(|minor| built_in(minor).is_some()));
        assert!([6, 8, 15].iter().all(|minor| built_in(*minor).is_none()));
    }
}

//! What the environment asks for. Reads `STRANDLINE_*` once; must not touch anything else of the process.
//!
//! `strandline run` sets these variables; a user who preloads the library by hand may set them too.

use std::ffi::OsString;
use std::path::PathBuf;

/// Where events come from; `Auto` is decided when torch is imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Mode {
    /// Nothing is served and nothing is watched.
    Off = 0,
    /// strandline's heap is the GPU's allocator.
    Heap = 1,
    /// torch's native allocator is watched.
    Observer = 2,
    /// CPU tensors are served from strandline's heap over host memory.
    Host = 3,
}

impl Mode {
    /// The word used in options and reports.
    pub fn word(self) -> &'static str {
        match self {
            Mode::Off => "off",
            Mode::Heap => "heap",
            Mode::Observer => "observer",
            Mode::Host => "host",
        }
    }

    /// The mode of a number of the C ABI.
    pub fn from_abi(mode: i32) -> Option<Mode> {
        [Mode::Off, Mode::Heap, Mode::Observer, Mode::Host].into_iter().find(|m| *m as i32 == mode)
    }
}

/// The options of this process.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Folder for reports (`STRANDLINE_OUT`), `strandline-out` in the working directory by default.
    pub out: Option<PathBuf>,
    /// Nothing on stderr except what must be said (`STRANDLINE_QUIET=1`).
    pub quiet: bool,
    /// Writes outside of live blocks are looked for (`STRANDLINE_GUARD=1`), in host memory.
    pub guard: bool,
    /// A report every so many steps (`STRANDLINE_EVERY`), 0 for never.
    pub every: u32,
    /// The signal that asks for a report (`STRANDLINE_SIGNAL`): `Some(0)` for none, `None` for the default.
    pub signal: Option<i32>,
    /// The library that findings and sites shown must have on their stack (`STRANDLINE_FOCUS`, or `focus:` in
    /// `STRANDLINE_CONF`).
    pub focus: Option<String>,
    /// Metrics for a scraper (`STRANDLINE_CONF=openmetrics:FILE`), rewritten as the job goes on.
    pub openmetrics: Option<PathBuf>,
    /// Whether a control socket is opened (not with `STRANDLINE_CONTROL=off`).
    pub control: bool,
}

impl Options {
    /// Reads the environment. Returns the options and what in them could not be understood.
    pub fn from_env() -> (Options, Vec<String>) {
        Self::from_lookup(|name| std::env::var_os(name))
    }

    fn from_lookup(get: impl Fn(&str) -> Option<OsString>) -> (Options, Vec<String>) {
        let mut wrong = Vec::new();
        let text = |name: &str| get(name).map(|v| v.to_string_lossy().into_owned()).filter(|v| !v.is_empty());
        let mut options = Options {
            out: get("STRANDLINE_OUT").filter(|v| !v.is_empty()).map(PathBuf::from),
            quiet: text("STRANDLINE_QUIET").is_some_and(|v| v != "0"),
            openmetrics: conf(&text("STRANDLINE_CONF").unwrap_or_default(), "openmetrics").map(PathBuf::from),
            control: text("STRANDLINE_CONTROL").is_none_or(|v| v != "0" && v != "off"),
            guard: text("STRANDLINE_GUARD").is_some_and(|v| v != "0"),
            ..Options::default()
        };
        if let Some(every) = text("STRANDLINE_EVERY") {
            match every.parse() {
                Ok(n) => options.every = n,
                Err(_) => wrong.push(format!("STRANDLINE_EVERY={every} is not a number of steps; ignored")),
            }
        }
        options.focus = text("STRANDLINE_FOCUS");
        for pair in
            text("STRANDLINE_CONF").unwrap_or_default().split(',').filter(|pair| !pair.trim().is_empty())
        {
            match pair.split_once(':').map(|(key, value)| (key.trim(), value.trim())) {
                Some(("focus", library)) if !library.is_empty() => {
                    options.focus.get_or_insert_with(|| library.to_owned());
                }
                Some(("openmetrics" | "serve_cuda", value)) if !value.is_empty() => {}
                Some(("slack" | "slack_before_wait", value)) if value.parse::<u32>().is_ok() => {}
                _ => wrong.push(format!(
                    "STRANDLINE_CONF: '{}' is not understood; the keys are: focus:LIBRARY, openmetrics:FILE, \
                     serve_cuda:1, slack:THOUSANDTHS, slack_before_wait:THOUSANDTHS",
                    pair.trim()
                )),
            }
        }
        if let Some(signal) = text("STRANDLINE_SIGNAL") {
            options.signal = signal_number(&signal);
            if options.signal.is_none() {
                wrong.push(format!(
                    "STRANDLINE_SIGNAL={signal} is neither a signal's name (SIGUSR2, RTMIN+3), a number nor 'none'; \
                     the default is used"
                ));
            }
        }
        (options, wrong)
    }
}

/// The value of a key in `key:value,key:value`; the last one counts.
fn conf(text: &str, wanted: &str) -> Option<String> {
    let entries = text.split(',').filter_map(|entry| entry.trim().split_once(':'));
    let mut values = entries.filter(|(key, value)| key.trim() == wanted && !value.trim().is_empty());
    values.next_back().map(|(_, value)| value.trim().to_owned())
}

/// `STRANDLINE_CONF=slack:N,slack_before_wait:N`: how far, in thousandths of the peak, a GPU's reserved memory may
/// rise above it before idle memory is mapped elsewhere, and before the host waits for the GPU to be able to.
pub fn slack() -> (Option<u32>, Option<u32>) {
    let text = std::env::var("STRANDLINE_CONF").unwrap_or_default();
    let number = |key| conf(&text, key).and_then(|value| value.parse().ok());
    (number("slack"), number("slack_before_wait"))
}

/// A signal by name or number; 0 for `none`.
fn signal_number(text: &str) -> Option<i32> {
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let max = libc::SIGRTMAX();
    match name {
        "NONE" | "OFF" => return Some(0),
        "USR1" => return Some(libc::SIGUSR1),
        "USR2" => return Some(libc::SIGUSR2),
        "HUP" => return Some(libc::SIGHUP),
        "QUIT" => return Some(libc::SIGQUIT),
        "PROF" => return Some(libc::SIGPROF),
        "RTMIN" => return Some(libc::SIGRTMIN()),
        _ => {}
    }
    if let Some(n) = name.strip_prefix("RTMIN+") {
        let number = n.parse::<i32>().ok().and_then(|n| libc::SIGRTMIN().checked_add(n));
        return number.filter(|number| (libc::SIGRTMIN()..=max).contains(number));
    }
    name.parse::<i32>().ok().filter(|n| (0..=max).contains(n))
}

/// This process's place in a distributed job: (rank, world size), from the launchers' variables.
pub fn rank_and_world() -> (i32, i32) {
    let number = |names: &[&str]| {
        names.iter().find_map(|name| std::env::var(name).ok().and_then(|v| v.trim().parse::<i32>().ok()))
    };
    let rank = number(&["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"]).unwrap_or(0);
    let world = number(&["WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]).unwrap_or(1);
    (rank, world.max(1))
}

/// The command line of this process as the kernel knows it.
pub fn command_line() -> Vec<String> {
    let raw = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    raw.split(|b| *b == 0)
        .filter(|a| !a.is_empty())
        .map(|a| String::from_utf8_lossy(a).into_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> (Options, Vec<String>) {
        Options::from_lookup(|name| pairs.iter().find(|p| p.0 == name).map(|p| OsString::from(p.1)))
    }

    #[test]
    fn an_empty_environment_gives_the_defaults() {
        let (options, wrong) = read(&[]);
        assert!(wrong.is_empty());
        assert!(!options.quiet && options.every == 0 && options.signal.is_none() && options.out.is_none());
    }

    #[test]
    fn conf_names_values_by_key() {
        assert_eq!(conf("a:1, openmetrics:/x/y:z.prom ,b:2", "openmetrics").as_deref(), Some("/x/y:z.prom"));
        assert_eq!(conf("a:1,b:2", "openmetrics"), None);
        assert_eq!(conf("openmetrics:", "openmetrics"), None);
        let (options, wrong) = read(&[("STRANDLINE_CONF", "openmetrics:m.prom")]);
        assert_eq!((options.openmetrics, wrong.len()), (Some(PathBuf::from("m.prom")), 0));
    }

    #[test]
    fn every_key_of_conf_is_known() {
        let all = "focus:x,openmetrics:m,serve_cuda:1,slack:10,slack_before_wait:1000";
        assert_eq!(read(&[("STRANDLINE_CONF", all)]).1, Vec::<String>::new());
        assert_eq!(read(&[("STRANDLINE_CONF", "slack:much,sarve_cuda:1")]).1.len(), 2);
    }

    #[test]
    fn wrong_values_are_named_and_ignored() {
        let (options, wrong) = read(&[("STRANDLINE_EVERY", "often"), ("STRANDLINE_SIGNAL", "SIGNOPE")]);
        assert_eq!(options.every, 0);
        assert_eq!(wrong.len(), 2);
        assert!(wrong[0].contains("often") && wrong[1].contains("SIGNOPE"));
    }

    #[test]
    fn focus_comes_from_either_variable() {
        assert_eq!(
            read(&[("STRANDLINE_CONF", "focus:torchmetrics")]).0.focus.as_deref(),
            Some("torchmetrics")
        );
        let both = [("STRANDLINE_CONF", "focus:a"), ("STRANDLINE_FOCUS", "b")];
        assert_eq!(read(&both).0.focus.as_deref(), Some("b"));
        assert_eq!(read(&[("STRANDLINE_CONF", "fokus:a")]).1.len(), 1);
    }

    #[test]
    fn signals_have_names_and_numbers() {
        assert_eq!(signal_number("SIGUSR2"), Some(libc::SIGUSR2));
        assert_eq!(signal_number("usr1"), Some(libc::SIGUSR1));
        assert_eq!(signal_number("none"), Some(0));
        assert_eq!(signal_number("RTMIN+7"), Some(libc::SIGRTMIN() + 7));
        assert_eq!(signal_number("RTMIN+700"), None);
        assert_eq!(signal_number("RTMIN+2147483647"), None);
        assert_eq!(signal_number("RTMIN+-40"), None);
        assert_eq!(signal_number("12"), Some(12));
        assert_eq!(signal_number("-1"), None);
    }
}

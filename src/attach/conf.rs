//! `STRANDLINE_CONF=key:value,key:value`: the one reader of it.
//!
//! Must not know what a key is for. Invariants: one rule for all keys: spaces around keys and values and empty
//! entries do not matter, of two values of one key the last counts, and an entry that is not understood is left
//! out and named, with the key that was probably meant.

use super::metrics::Listen;
use super::spelling;
use crate::heap::Preset;
use std::path::PathBuf;
use std::sync::OnceLock;

/// The settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conf {
    /// The library that findings and sites shown must have on their stack.
    pub focus: Option<String>,
    /// Metrics for a scraper, rewritten as the job goes on.
    pub openmetrics: Option<PathBuf>,
    /// Where a scraper may ask for metrics.
    pub openmetrics_listen: Option<Listen>,
    /// Whether the heap serves what CUDA's own functions are asked for.
    pub serve_cuda: Option<bool>,
    /// What the heap of a GPU is to save.
    pub preset: Option<Preset>,
    /// How far, in thousandths of the peak, a GPU's reserved memory may rise above it before idle memory is mapped
    /// elsewhere …
    pub slack: Option<u32>,
    /// … and before the host waits for the GPU to be able to.
    pub slack_before_wait: Option<u32>,
}

/// The keys, each with the kind of its value.
const KEYS: [(&str, &str); 7] = [
    ("focus", "LIBRARY"),
    ("openmetrics", "FILE"),
    ("openmetrics_listen", "[ADDR:]PORT"),
    ("preset", "speed|lean"),
    ("serve_cuda", "0|1"),
    ("slack", "THOUSANDTHS"),
    ("slack_before_wait", "THOUSANDTHS"),
];

impl Conf {
    /// The settings of this process, read once.
    pub fn of_this_process() -> &'static Conf {
        &Self::read_once().0
    }

    /// What in them was not understood, a sentence each.
    pub fn faults() -> &'static [String] {
        &Self::read_once().1
    }

    fn read_once() -> &'static (Conf, Vec<String>) {
        static CONF: OnceLock<(Conf, Vec<String>)> = OnceLock::new();
        CONF.get_or_init(|| {
            Conf::parse(&std::env::var_os("STRANDLINE_CONF").unwrap_or_default().to_string_lossy())
        })
    }

    /// Reads a text. Returns the settings and what was not understood.
    pub fn parse(text: &str) -> (Conf, Vec<String>) {
        let (mut conf, mut faults) = (Conf::default(), Vec::new());
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (key, value) = entry.split_once(':').map_or((entry, ""), |(k, v)| (k.trim(), v.trim()));
            if !conf.set(key, value) {
                faults.push(fault(key, value));
            }
        }
        (conf, faults)
    }

    /// False if there is no such key, or its value cannot be that.
    fn set(&mut self, key: &str, value: &str) -> bool {
        fn put<T>(place: &mut Option<T>, value: Option<T>) -> bool {
            let good = value.is_some();
            *place = value.or(place.take());
            good
        }
        let text = Some(value).filter(|value| !value.is_empty());
        match key {
            "focus" => put(&mut self.focus, text.map(str::to_owned)),
            "openmetrics" => put(&mut self.openmetrics, text.map(PathBuf::from)),
            "openmetrics_listen" => put(&mut self.openmetrics_listen, value.parse().ok()),
            "serve_cuda" => put(&mut self.serve_cuda, yes_or_no(value)),
            "preset" => put(&mut self.preset, value.parse().ok()),
            "slack" => put(&mut self.slack, value.parse().ok()),
            "slack_before_wait" => put(&mut self.slack_before_wait, value.parse().ok()),
            _ => false,
        }
    }
}

fn yes_or_no(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" => Some(true),
        "0" | "false" => Some(false),
        _ => None,
    }
}

fn fault(key: &str, value: &str) -> String {
    if let Some((_, kind)) = KEYS.iter().find(|(known, _)| *known == key) {
        return format!("STRANDLINE_CONF: {key}:{value} is ignored; write {key}:{kind}");
    }
    let meant = spelling::nearest(key, KEYS.iter().map(|(known, _)| *known));
    let meant = meant.map_or(String::new(), |meant| format!(" (did you mean {meant}?)"));
    let all: Vec<String> = KEYS.iter().map(|(known, kind)| format!("{known}:{kind}")).collect();
    format!("STRANDLINE_CONF: the key '{key}' is unknown and ignored{meant}; the keys: {}", all.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Conf {
        let (conf, faults) = Conf::parse(text);
        assert_eq!(faults, Vec::<String>::new(), "{text}");
        conf
    }

    #[test]
    fn every_key_is_known_and_spaces_and_empty_entries_do_not_matter() {
        let all = " focus:x,, openmetrics : /x/y:z.prom ,openmetrics_listen: [::1]:9400,serve_cuda:1,preset:Lean,slack:10,slack_before_wait:1000,";
        let conf = read(all);
        assert_eq!(
            conf,
            Conf {
                focus: Some("x".into()),
                openmetrics: Some("/x/y:z.prom".into()),
                openmetrics_listen: "[::1]:9400".parse().ok(),
                serve_cuda: Some(true),
                preset: Some(Preset::Lean),
                slack: Some(10),
                slack_before_wait: Some(1000),
            }
        );
        assert_eq!(KEYS.len(), 7);
        assert_eq!(read(""), Conf::default());
    }

    #[test]
    fn of_two_values_the_last_counts_for_every_key() {
        assert_eq!(read("focus:a,focus:b").focus.as_deref(), Some("b"));
        assert_eq!(read("openmetrics:a,openmetrics:b").openmetrics, Some("b".into()));
        assert_eq!(read("serve_cuda:0,serve_cuda:True").serve_cuda, Some(true));
        assert_eq!(read("slack:1,slack:2").slack, Some(2));
        assert_eq!(read("slack_before_wait:1,slack_before_wait:2").slack_before_wait, Some(2));
    }

    #[test]
    fn a_bad_value_is_named_and_an_earlier_good_one_stays() {
        for entry in [
            "focus:",
            "openmetrics: ",
            "openmetrics_listen:everywhere",
            "preset:fat",
            "serve_cuda:perhaps",
            "slack:much",
            "slack_before_wait:-1",
            "slack",
        ] {
            let key = entry.split(':').next().unwrap_or_default();
            let (conf, faults) = Conf::parse(entry);
            assert_eq!(conf, Conf::default(), "{entry}");
            assert!(faults.len() == 1 && faults[0].contains(&format!("write {key}:")), "{faults:?}");
        }
        assert_eq!(Conf::parse("slack:7,slack:much").0.slack, Some(7));
    }

    #[test]
    fn an_unknown_key_is_named_with_the_one_that_was_meant_and_all_that_there_are() {
        let (_, faults) = Conf::parse("sarve_cuda:1,something:2,fokus");
        assert_eq!(faults.len(), 3);
        assert!(faults[0].contains("'sarve_cuda'") && faults[0].contains("did you mean serve_cuda?"));
        assert!(faults[0].contains("slack_before_wait:THOUSANDTHS"));
        assert!(
            !faults[1].contains("did you mean") && faults[1].contains("ignored; the keys: focus:LIBRARY")
        );
        assert!(faults[2].contains("did you mean focus?"));
    }
}

//! What `strandline top` knows: the newest state of the run, how it is sorted and filtered, what was typed.
//!
//! Must not know: terminals, sockets.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::collections::HashMap;
use strandline::report::live::{Live, LiveDevice, LiveSite};

/// Samples kept for a run that has no steps.
const SAMPLES: usize = 600;

/// The order of the sites.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    #[default]
    Live,
    Growth,
    Since,
    Blocks,
    Place,
}

impl Sort {
    const ALL: [Sort; 5] = [Sort::Live, Sort::Growth, Sort::Since, Sort::Blocks, Sort::Place];

    pub fn name(self) -> &'static str {
        match self {
            Sort::Live => "live",
            Sort::Growth => "growth",
            Sort::Since => "since",
            Sort::Blocks => "blocks",
            Sort::Place => "place",
        }
    }

    fn next(self) -> Sort {
        let at = Sort::ALL.iter().position(|sort| *sort == self).unwrap_or(0);
        Sort::ALL[(at + 1) % Sort::ALL.len()]
    }
}

/// What a key asks of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    Nothing,
    Quit,
    /// Write a report now.
    Dump,
}

/// One site as it is shown.
pub struct Row<'a> {
    pub site: &'a LiveSite,
    pub place: String,
    /// Live bytes against those when watching began.
    pub since: i64,
}

/// The state of the view.
#[derive(Default)]
pub struct App {
    pub live: Option<Live>,
    pub sort: Sort,
    pub filter: String,
    pub typing: bool,
    pub selected: usize,
    pub device: usize,
    pub paused: bool,
    pub help: bool,
    /// Why nothing new comes any more.
    pub ended: Option<String>,
    pub note: String,
    /// (seconds, allocated, reserved) by device, for runs without steps.
    samples: HashMap<i64, Vec<(f64, u64, u64)>>,
    first: HashMap<(i64, u32), u64>,
    began: bool,
}

impl App {
    /// A new state of the run came in.
    pub fn take(&mut self, live: Live) {
        if self.paused {
            return;
        }
        for site in &live.sites {
            // A site that comes later had nothing, as far as was seen.
            let then = if self.began { 0 } else { site.live_bytes };
            self.first.entry((site.device, site.stack_id)).or_insert(then);
        }
        self.began = true;
        for device in &live.devices {
            let samples = self.samples.entry(device.device).or_default();
            if samples.len() == SAMPLES {
                let mut odd = false;
                samples.retain(|_| {
                    odd = !odd;
                    odd
                });
            }
            samples.push((live.seconds, device.allocated, device.reserved));
        }
        self.device = self.device.min(live.devices.len().saturating_sub(1));
        self.live = Some(live);
        self.selected = self.selected.min(self.rows().len().saturating_sub(1));
    }

    /// The device that is shown.
    pub fn device(&self) -> Option<&LiveDevice> {
        self.live.as_ref()?.devices.get(self.device)
    }

    /// The curves (x, allocated, reserved) and what x is.
    pub fn curves(&self) -> (Vec<(f64, u64, u64)>, &'static str) {
        let (Some(live), Some(device)) = (&self.live, self.device()) else { return (Vec::new(), "") };
        if device.series.len() >= 2 {
            let past = device.series.iter().map(|&(step, a, r)| (f64::from(step), a, r));
            let now = (live.steps as f64, device.allocated, device.reserved);
            return (past.chain([now]).collect(), "step");
        }
        (self.samples.get(&device.device).cloned().unwrap_or_default(), "second")
    }

    /// The sites of the shown device, sorted and filtered.
    pub fn rows(&self) -> Vec<Row<'_>> {
        let (Some(live), Some(device)) = (&self.live, self.device()) else { return Vec::new() };
        let wanted = self.filter.to_lowercase();
        let mut rows: Vec<Row> = live
            .sites
            .iter()
            .filter(|site| site.device == device.device)
            .map(|site| {
                let first = self.first.get(&(site.device, site.stack_id)).copied().unwrap_or(0);
                Row { site, place: place(site), since: site.live_bytes as i64 - first as i64 }
            })
            .filter(|row| wanted.is_empty() || row.place.to_lowercase().contains(&wanted))
            .collect();
        match self.sort {
            Sort::Live => rows.sort_by_key(|row| std::cmp::Reverse(row.site.live_bytes)),
            Sort::Growth => rows.sort_by(|a, b| b.site.bytes_per_step.total_cmp(&a.site.bytes_per_step)),
            Sort::Since => rows.sort_by_key(|row| std::cmp::Reverse(row.since)),
            Sort::Blocks => rows.sort_by_key(|row| std::cmp::Reverse(row.site.live_blocks)),
            Sort::Place => rows.sort_by(|a, b| a.place.cmp(&b.place)),
        }
        rows
    }

    /// A key was pressed.
    pub fn key(&mut self, key: KeyEvent) -> Wish {
        if key.kind == KeyEventKind::Release {
            return Wish::Nothing;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) && matches!(key.code, KeyCode::Char('c' | 'd')) {
            return Wish::Quit;
        }
        if self.typing {
            match key.code {
                KeyCode::Enter => self.typing = false,
                KeyCode::Esc => (self.typing, self.filter) = (false, String::new()),
                KeyCode::Backspace => drop(self.filter.pop()),
                KeyCode::Char(c) => self.filter.push(c),
                _ => {}
            }
            self.selected = 0;
            return Wish::Nothing;
        }
        if self.help {
            self.help = false;
            return Wish::Nothing;
        }
        let last = self.rows().len().saturating_sub(1);
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Wish::Quit,
            KeyCode::Char('w') => return Wish::Dump,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char('p' | ' ') => self.paused = !self.paused,
            KeyCode::Char('?' | 'h') => self.help = true,
            KeyCode::Char('d') | KeyCode::Tab => {
                let devices = self.live.as_ref().map_or(1, |live| live.devices.len().max(1));
                self.device = (self.device + 1) % devices;
                self.selected = 0;
            }
            KeyCode::Down | KeyCode::Char('j') => self.selected = (self.selected + 1).min(last),
            KeyCode::Up | KeyCode::Char('k') => self.selected = self.selected.saturating_sub(1),
            KeyCode::PageDown => self.selected = (self.selected + 10).min(last),
            KeyCode::PageUp => self.selected = self.selected.saturating_sub(10),
            KeyCode::Home => self.selected = 0,
            KeyCode::End => self.selected = last,
            _ => {}
        }
        Wish::Nothing
    }
}

/// "model.py:17 in forward".
pub fn place(site: &LiveSite) -> String {
    site.allocated_at.as_ref().map_or_else(
        || "an unknown place".to_owned(),
        |at| format!("{}:{} in {}", at.file.rsplit('/').next().unwrap_or_default(), at.line, at.function),
    )
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use strandline::ledger::Frame;
    use strandline::report::live::LiveFinding;

    pub fn frame(file: &str, line: u32, function: &str) -> Frame {
        Frame { file: file.into(), line, function: function.into(), kind: "python".into(), user: true }
    }

    pub fn live() -> Live {
        let site = |id, file: &str, bytes, growth| LiveSite {
            device: 0,
            stack_id: id,
            allocated_at: Some(frame(file, id, "forward")),
            phase: "forward".into(),
            live_bytes: bytes,
            live_blocks: 100 - u64::from(id),
            bytes_per_step: growth,
            oldest: Some(3),
        };
        Live {
            pid: 4711,
            world_size: 2,
            mode: "heap".into(),
            command: vec!["python".into(), "train.py".into()],
            seconds: 61.0,
            steps: 120,
            epoch: 2,
            phase: "backward".into(),
            step_seconds: Some(0.25),
            verdict: "leak".into(),
            reason: "1 finding".into(),
            devices: vec![
                LiveDevice {
                    device: 0,
                    allocated: 3 << 30,
                    reserved: 4 << 30,
                    peak: 4 << 30,
                    live_blocks: 321,
                    total: Some(80 << 30),
                    series: (0..60).map(|n| (n * 2, u64::from(n) << 25, u64::from(n + 4) << 25)).collect(),
                    map: (0..64).map(|n| (n * 100 / 63) as u8).collect(),
                    cell_bytes: 64 << 20,
                    largest_free: 300 << 20,
                },
                LiveDevice { device: 1, ..LiveDevice::default() },
            ],
            sites: vec![site(1, "/src/model.py", 5 << 20, 0.0), site(2, "/src/train.py", 1 << 20, 4096.0)],
            findings: vec![LiveFinding {
                class: "per-iteration".into(),
                rate: "+4.0 KiB/step".into(),
                live_bytes: 1 << 20,
                allocated_at: Some(frame("/src/train.py", 2, "forward")),
                held_by: "train.py: global kept > [119]".into(),
                kept_at: "train.py:9  kept.append(loss)".into(),
                fix: "append a number".into(),
                ..LiveFinding::default()
            }],
            ..Live::default()
        }
    }

    fn press(app: &mut App, keys: &str) -> Wish {
        keys.chars().map(|c| app.key(KeyEvent::from(KeyCode::Char(c)))).last().unwrap()
    }

    #[test]
    fn sorts_and_filters() {
        let mut app = App::default();
        app.take(live());
        let order = |app: &App| app.rows().iter().map(|row| row.site.stack_id).collect::<Vec<_>>();
        assert_eq!(order(&app), [1, 2]);
        press(&mut app, "s");
        assert_eq!((app.sort, order(&app)), (Sort::Growth, vec![2, 1]));
        press(&mut app, "/TRAIN");
        assert!(app.typing);
        assert_eq!(order(&app), [2]);
        app.key(KeyEvent::from(KeyCode::Enter));
        assert_eq!(press(&mut app, "w"), Wish::Dump);
        press(&mut app, "/");
        app.key(KeyEvent::from(KeyCode::Esc));
        assert_eq!(order(&app).len(), 2);
        assert_eq!(press(&mut app, "q"), Wish::Quit);
    }

    #[test]
    fn what_grows_while_it_is_watched_is_counted_from_then() {
        let mut app = App::default();
        app.take(live());
        let mut later = live();
        later.sites[1].live_bytes += 7;
        later.sites.push(LiveSite { device: 0, stack_id: 9, live_bytes: 5, ..LiveSite::default() });
        app.take(later);
        let since: Vec<(u32, i64)> = app.rows().iter().map(|row| (row.site.stack_id, row.since)).collect();
        assert_eq!(since, [(1, 0), (2, 7), (9, 5)]);
        press(&mut app, "p");
        app.take(Live::default());
        assert_eq!(app.live.as_ref().unwrap().pid, 4711, "paused");
    }

    #[test]
    fn keys_on_an_empty_view_do_no_harm() {
        let mut app = App::default();
        for code in [KeyCode::Down, KeyCode::PageDown, KeyCode::End, KeyCode::Tab, KeyCode::Char('s')] {
            app.key(KeyEvent::from(code));
        }
        assert_eq!(app.selected, 0);
        app.take(Live::default());
        assert!(app.rows().is_empty());
    }
}

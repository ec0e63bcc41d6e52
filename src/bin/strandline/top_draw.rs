//! Draws the view of `strandline top`.
//!
//! Must not know: where the state comes from. Invariant: draws into any size without a panic; what matters
//! most is kept longest as the terminal shrinks: figures, findings, sites, map, curves.

use crate::top_model::{App, Sort};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{
    Axis, Block, Borders, Cell, Chart, Clear, Dataset, GraphType, LegendPosition, Paragraph, Row, Table,
    TableState,
};
use strandline::report::live::{Live, LiveDevice};
use strandline::report::units;

/// Colours, or none of them.
#[derive(Clone, Copy)]
pub struct Look {
    pub colour: bool,
}

impl Look {
    fn fg(self, colour: Color) -> Style {
        if self.colour { Style::new().fg(colour) } else { Style::new() }
    }

    fn bold(self, colour: Color) -> Style {
        self.fg(colour).add_modifier(Modifier::BOLD)
    }
}

const KEYS: &str = "q quit  s sort  / filter  ↑↓ move  d device  p pause  w write a report  ? help";
const HELP: [&str; 10] = [
    "live     bytes of the site's live blocks at the last step",
    "growth   bytes per step over the newer half of the site's history",
    "since    change since you began to watch",
    "oldest   the step in which its oldest live block was born",
    "map      mapped memory by address:   empty  ░▒▓ partly  █ in use",
    "",
    "q Esc quit   s next order   / type a filter (Enter keeps, Esc clears)",
    "↑ ↓ PgUp PgDn Home End move   d Tab next device   p Space pause",
    "w have the job write its report now",
    "any key closes this",
];

/// Draws everything.
pub fn draw(frame: &mut Frame, app: &App, look: Look) {
    let area = frame.area();
    let Some(live) = &app.live else {
        let text = app.ended.as_deref().unwrap_or("waiting for the job to answer …");
        frame.render_widget(Paragraph::new(text).wrap(ratatui::widgets::Wrap { trim: true }), area);
        return;
    };
    let tall = area.height;
    let findings = live.findings.len().min(if tall >= 30 { 3 } else { 1 });
    let findings = if tall >= 10 { findings as u16 * if tall >= 20 { 2 } else { 1 } } else { 0 };
    let mapped = app.device().is_some_and(|device| !device.map.is_empty());
    let map = if mapped && tall >= 12 { 2 } else { 0 };
    let chart = if tall >= 18 { (tall / 3).clamp(6, 14) } else { 0 };
    let header = if tall >= 5 { 3 } else { 1 };
    let [top, curves, bar, found, sites, foot] = Layout::vertical([
        Constraint::Length(header),
        Constraint::Length(chart),
        Constraint::Length(map),
        Constraint::Length(findings),
        Constraint::Min(0),
        Constraint::Length(u16::from(tall >= 3)),
    ])
    .areas(area);
    draw_header(frame, top, app, live, look);
    if chart > 0 {
        draw_curves(frame, curves, app, look);
    }
    if let Some(device) = app.device().filter(|_| map > 0) {
        draw_map(frame, bar, device, look);
    }
    draw_findings(frame, found, live, look);
    draw_sites(frame, sites, app, look);
    draw_foot(frame, foot, app, look);
    if app.help {
        draw_help(frame, area);
    }
}

fn device_name(device: i64) -> String {
    if device < 0 { "host".to_owned() } else { format!("device {device}") }
}

fn draw_header(frame: &mut Frame, area: Rect, app: &App, live: &Live, look: Look) {
    let rank = if live.world_size > 1 {
        format!("  rank {} of {}", live.rank, live.world_size)
    } else {
        String::new()
    };
    let (word, colour) = match live.verdict.as_str() {
        "leak" => ("LEAK", Color::Red),
        "fragmentation" => ("FRAGMENTATION", Color::Red),
        "clean" => ("clean", Color::Green),
        _ => ("undecided", Color::Yellow),
    };
    let speed = live.step_seconds.filter(|seconds| *seconds > 0.0).map_or_else(String::new, |seconds| {
        if seconds < 1.0 {
            format!("  {:.1} steps/s", 1.0 / seconds)
        } else {
            format!("  {seconds:.1} s/step")
        }
    });
    let mut lines = vec![Line::from(vec![
        Span::styled(format!("strandline  {}", live.pid), Style::new().add_modifier(Modifier::BOLD)),
        Span::raw(format!("{rank}  {}  ", live.mode)),
        Span::styled(word, look.bold(colour)),
        Span::raw(format!("  {}", live.command.join(" "))),
    ])];
    lines.push(Line::raw(format!(
        "step {}  epoch {}  phase {}{speed}  up {}{}",
        live.steps,
        live.epoch,
        live.phase,
        units::duration(live.seconds),
        live.metrics.as_ref().map_or_else(String::new, |url| format!("  metrics {url}"))
    )));
    if let Some(device) = app.device() {
        let more = live.devices.len();
        let of = if more > 1 { format!(" ({} of {more}, d: next)", app.device + 1) } else { String::new() };
        let total =
            device.total.map_or_else(String::new, |total| format!(" of {}", units::bytes(total as f64)));
        lines.push(Line::from(vec![
            Span::raw(format!("{}{of}  ", device_name(device.device))),
            Span::styled(
                format!("allocated {}", units::bytes(device.allocated as f64)),
                look.bold(Color::Cyan),
            ),
            Span::styled(
                format!("  reserved {}{total}", units::bytes(device.reserved as f64)),
                look.fg(Color::Yellow),
            ),
            Span::raw(format!(
                "  peak {}  {}",
                units::bytes(device.peak as f64),
                units::plural(device.live_blocks, "live block")
            )),
        ]));
    } else {
        lines.push(Line::raw("no block was handed out yet"));
    }
    if let Some(ended) = &app.ended {
        lines[1] = Line::styled(ended.clone(), look.bold(Color::Red));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

fn draw_curves(frame: &mut Frame, area: Rect, app: &App, look: Look) {
    let (points, unit) = app.curves();
    let most = points.iter().map(|point| point.1.max(point.2)).max().unwrap_or(0).max(1) as f64;
    let allocated: Vec<(f64, f64)> = points.iter().map(|point| (point.0, point.1 as f64)).collect();
    let reserved: Vec<(f64, f64)> = points.iter().map(|point| (point.0, point.2 as f64)).collect();
    let first = points.first().map_or(0.0, |point| point.0);
    let last = points.last().map_or(1.0, |point| point.0).max(first + 1.0);
    // Without colours the curves are told apart by their dots.
    let marker = if look.colour { Marker::Braille } else { Marker::Dot };
    let line = |name: &'static str, data, colour, marker| {
        let set = Dataset::default().name(name).data(data).graph_type(GraphType::Line).marker(marker);
        set.style(look.fg(colour))
    };
    let x = Axis::default()
        .bounds([first, last])
        .labels([format!("{unit} {first:.0}"), format!("{last:.0}")])
        .style(look.fg(Color::DarkGray));
    let y = Axis::default()
        .bounds([0.0, most * 1.05])
        .labels(["0".to_owned(), units::bytes(most)])
        .style(look.fg(Color::DarkGray));
    let sets = vec![
        line("reserved", &reserved, Color::Yellow, marker),
        line("allocated", &allocated, Color::Cyan, Marker::Braille),
    ];
    let chart = Chart::new(sets)
        .x_axis(x)
        .y_axis(y)
        // What matters of the curves is at their right end.
        .legend_position(Some(LegendPosition::TopLeft))
        .hidden_legend_constraints((Constraint::Percentage(50), Constraint::Percentage(60)));
    frame.render_widget(chart, area);
}

fn draw_map(frame: &mut Frame, area: Rect, device: &LiveDevice, look: Look) {
    let width = usize::from(area.width.max(1));
    let cells = device.map.len().max(1);
    let bar: String = (0..width)
        .map(|at| {
            // The cells that fall on this character.
            let (from, to) = (at * cells / width, ((at + 1) * cells / width).max(at * cells / width + 1));
            let part = &device.map[from.min(cells - 1)..to.min(cells)];
            let full = part.iter().map(|percent| u32::from(*percent)).sum::<u32>() / part.len().max(1) as u32;
            match full {
                0 => ' ',
                1..=33 => '░',
                34..=66 => '▒',
                67..=98 => '▓',
                _ => '█',
            }
        })
        .collect();
    let idle = device.reserved.saturating_sub(device.allocated);
    let share = (idle * 100).checked_div(device.reserved).unwrap_or(0);
    let text = format!(
        "map  {} idle ({share} % of reserved), largest hole {}",
        units::bytes(idle as f64),
        units::bytes(device.largest_free as f64)
    );
    frame.render_widget(Paragraph::new(vec![Line::raw(text), Line::styled(bar, look.fg(Color::Blue))]), area);
}

fn draw_findings(frame: &mut Frame, area: Rect, live: &Live, look: Look) {
    let each = if area.height as usize >= 2 * live.findings.len().min(3) { 2 } else { 1 };
    let mut lines = Vec::new();
    for finding in &live.findings {
        let at = finding.allocated_at.as_ref().map_or_else(String::new, |at| {
            format!("  at {}:{}", at.file.rsplit('/').next().unwrap_or_default(), at.line)
        });
        lines.push(Line::from(vec![
            Span::styled(format!("{} {}", finding.class, finding.rate), look.bold(Color::Red)),
            Span::raw(format!(
                "{at}  held by {}",
                if finding.held_by.is_empty() { "?" } else { &finding.held_by }
            )),
        ]));
        if each == 2 {
            let kept =
                if finding.kept_at.is_empty() { String::new() } else { format!("{}  ", finding.kept_at) };
            lines.push(Line::raw(format!("  {kept}fix: {}", finding.fix)));
        }
    }
    frame.render_widget(Paragraph::new(lines), area);
}

fn draw_sites(frame: &mut Frame, area: Rect, app: &App, look: Look) {
    if area.height == 0 {
        return;
    }
    let rows = app.rows();
    let wide = area.width >= 72;
    let mark = |name: &'static str, sort| {
        Cell::from(if app.sort == sort { format!("{name}▾") } else { name.to_owned() })
    };
    let mut heads = vec![mark("live", Sort::Live), mark("growth/step", Sort::Growth)];
    let mut widths = vec![Constraint::Length(11), Constraint::Length(12)];
    if wide {
        heads.extend([mark("since", Sort::Since), mark("blocks", Sort::Blocks), Cell::from("oldest")]);
        widths.extend([Constraint::Length(12), Constraint::Length(9), Constraint::Length(7)]);
    }
    heads.push(mark("site", Sort::Place));
    widths.push(Constraint::Fill(1));
    let signed = |bytes: f64| {
        if bytes == 0.0 {
            "-".to_owned()
        } else {
            format!("{}{}", if bytes < 0.0 { "-" } else { "+" }, units::bytes(bytes.abs()))
        }
    };
    let body = rows.iter().map(|row| {
        let grows = row.site.bytes_per_step >= 1.0;
        let mut cells = vec![
            Cell::from(units::bytes(row.site.live_bytes as f64)),
            Cell::from(Span::styled(
                signed(row.site.bytes_per_step.round()),
                if grows { look.fg(Color::Red) } else { Style::new() },
            )),
        ];
        if wide {
            cells.push(Cell::from(signed(row.since as f64)));
            cells.push(Cell::from(units::count(row.site.live_blocks)));
            cells.push(Cell::from(row.site.oldest.map_or_else(|| "-".to_owned(), |step| step.to_string())));
        }
        cells.push(Cell::from(row.place.clone()));
        Row::new(cells)
    });
    let table = Table::new(body, widths)
        .header(Row::new(heads).style(Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::default().with_selected(Some(app.selected).filter(|_| !rows.is_empty()));
    frame.render_stateful_widget(table, area, &mut state);
}

fn draw_foot(frame: &mut Frame, area: Rect, app: &App, look: Look) {
    let line = if app.typing {
        Line::styled(format!("filter: {}▏ (Enter keeps, Esc clears)", app.filter), look.bold(Color::Cyan))
    } else if !app.note.is_empty() {
        Line::styled(app.note.clone(), look.bold(Color::Cyan))
    } else {
        let mut facts = format!("sort {}", app.sort.name());
        if !app.filter.is_empty() {
            facts += &format!("  filter {:?}", app.filter);
        }
        if app.paused {
            facts += "  PAUSED";
        }
        Line::styled(format!("{facts}  │  {KEYS}"), look.fg(Color::DarkGray))
    };
    frame.render_widget(Paragraph::new(line), area);
}

fn draw_help(frame: &mut Frame, area: Rect) {
    let width = 74.min(area.width);
    let height = (HELP.len() as u16 + 2).min(area.height);
    let place = Rect::new((area.width - width) / 2, (area.height - height) / 2, width, height);
    frame.render_widget(Clear, place);
    let lines: Vec<Line> = HELP.iter().map(|line| Line::raw(*line)).collect();
    frame.render_widget(
        Paragraph::new(lines).block(Block::new().borders(Borders::ALL).title(" help ")),
        place,
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top_model::tests::live;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn screen(app: &App, width: u16, height: u16, colour: bool) -> (String, bool) {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, app, Look { colour })).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let coloured = buffer.content.iter().any(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset);
        let lines: Vec<String> = buffer
            .content
            .chunks(usize::from(width).max(1))
            .map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned())
            .collect();
        (lines.join("\n"), coloured)
    }

    fn app() -> App {
        let mut app = App::default();
        app.take(live());
        app
    }

    #[test]
    fn a_usual_terminal_shows_everything() {
        let (text, coloured) = screen(&app(), 110, 34, true);
        for part in [
            "strandline  4711  rank 0 of 2  heap  LEAK  python train.py",
            "step 120  epoch 2  phase backward  4.0 steps/s  up 61 s",
            "allocated 3.0 GiB  reserved 4.0 GiB of 80.0 GiB  peak 4.0 GiB  321 live blocks",
            "1.0 GiB idle (25 % of reserved), largest hole 300.0 MiB",
            "per-iteration +4.0 KiB/step  at train.py:2  held by train.py: global kept > [119]",
            "train.py:9  kept.append(loss)  fix: append a number",
            "live▾",
            "│reserved ",
            "│allocated│",
            "model.py:1 in forward",
            "+4.0 KiB",
            "q quit",
        ] {
            assert!(text.contains(part), "{part:?} is not on\n{text}");
        }
        assert!(text.contains('█') && text.contains('░'), "no map on\n{text}");
        assert!(text.chars().any(|c| ('\u{2801}'..='\u{28ff}').contains(&c)), "no curve on\n{text}");
        assert!(coloured);
    }

    #[test]
    fn no_colour_means_none() {
        let (text, coloured) = screen(&app(), 110, 34, false);
        assert!(!coloured && text.contains("LEAK"));
    }

    #[test]
    fn any_size_is_drawn() {
        let mut app = app();
        app.help = true;
        for (width, height) in [(1, 1), (2, 3), (20, 5), (40, 9), (60, 12), (71, 19), (300, 100), (500, 1)] {
            screen(&app, width, height, true);
            screen(&App::default(), width, height, true);
        }
        app.help = false;
        let (small, _) = screen(&app, 40, 10, true);
        assert!(small.contains("step 120") && small.contains("model.py:1"), "{small}");
    }

    #[test]
    fn the_end_of_the_job_is_said_and_the_last_state_stays() {
        let mut app = app();
        app.ended = Some("process 4711 ended".into());
        let (text, _) = screen(&app, 80, 24, false);
        assert!(text.contains("process 4711 ended") && text.contains("model.py:1"), "{text}");
    }
}

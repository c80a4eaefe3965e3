//! How things look: colours where they are wanted, and characters that the terminal has.

use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Span;

/// What a piece of text is, which decides how it looks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Tone {
    #[default]
    Plain,
    /// Of less weight: what is missing, units, titles of columns.
    Dim,
    /// The name of a part of the screen.
    Title,
    /// Work.
    Good,
    /// Worth a look.
    Warn,
    /// Wrong.
    Bad,
}

/// How to show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Theme {
    /// Whether colours are wanted.
    pub(crate) has_colors: bool,
    /// Whether the terminal has more than ASCII.
    pub(crate) has_blocks: bool,
}

impl Theme {
    /// What the environment asks for: no colours with `NO_COLOR`, nothing but ASCII where the locale is not UTF-8.
    pub(crate) fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set);
        let is_utf8 = |locale: String| {
            let locale = locale.to_ascii_lowercase();
            locale.contains("utf-8") || locale.contains("utf8")
        };
        Self {
            has_colors: set("NO_COLOR").is_none() && set("TERM").is_none_or(|term| term != "dumb"),
            has_blocks: locale.is_some_and(is_utf8),
        }
    }

    pub(crate) fn style(self, tone: Tone) -> Style {
        let (color, is_bold) = match tone {
            Tone::Plain => return Style::new(),
            Tone::Dim => (Color::DarkGray, false),
            Tone::Title => (Color::Cyan, true),
            Tone::Good => (Color::Green, false),
            Tone::Warn => (Color::Yellow, false),
            Tone::Bad => (Color::Red, true),
        };
        let style = if is_bold {
            Style::new().add_modifier(Modifier::BOLD)
        } else {
            Style::new()
        };
        if self.has_colors {
            style.fg(color)
        } else {
            style
        }
    }

    /// The style of the row that the keys are at.
    pub(crate) fn selected(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    /// The colour of one of several curves.
    pub(crate) fn series(self, number: usize) -> Color {
        const COLORS: [Color; 8] = [
            Color::Cyan,
            Color::Yellow,
            Color::Green,
            Color::Magenta,
            Color::Blue,
            Color::Red,
            Color::Gray,
            Color::LightRed,
        ];
        match self.has_colors {
            true => COLORS[number % COLORS.len()],
            false => Color::Reset,
        }
    }

    /// `width` characters of a bar that is so much full, from 0 to 1.
    pub(crate) fn bar(self, share: f64, width: usize) -> (String, String) {
        let share = if share.is_finite() {
            share.clamp(0.0, 1.0)
        } else {
            0.0
        };
        let eighths = (share * (width * 8) as f64).round() as usize;
        if !self.has_blocks {
            let full = (eighths + 4) / 8;
            return ("#".repeat(full), ".".repeat(width - full));
        }
        let mut text = "█".repeat(eighths / 8);
        let parts = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
        text.push_str(parts[eighths % 8]);
        (text, "·".repeat(width - eighths.div_ceil(8)))
    }

    /// One character for a value from 0 to 100, a blank for none.
    pub(crate) fn level(self, percent: Option<u8>) -> char {
        let Some(percent) = percent else { return ' ' };
        let levels: [char; 9] = match self.has_blocks {
            true => ['·', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'],
            false => ['_', '.', ':', '-', '=', '+', '*', '%', '#'],
        };
        // Only nothing at all looks like nothing.
        let step = usize::from(percent.min(100)) * 8;
        levels[step.div_ceil(100)]
    }

    /// Up and down, for what is sent and received.
    pub(crate) fn arrows(self) -> [&'static str; 2] {
        if self.has_blocks {
            ["↑", "↓"]
        } else {
            ["tx ", "rx "]
        }
    }

    /// The beginning of a text that is too wide, with a mark that there is more.
    pub(crate) fn cut(self, text: &str, width: usize) -> String {
        if Span::raw(text).width() <= width {
            return text.to_owned();
        }
        let mark = if self.has_blocks { "…" } else { "~" };
        let mut kept = String::new();
        for c in text.chars() {
            kept.push(c);
            if Span::raw(kept.as_str()).width() + 1 > width {
                kept.pop();
                break;
            }
        }
        if width > 0 {
            kept.push_str(mark);
        }
        kept
    }

    /// A point of a curve that has few.
    pub(crate) fn point(self) -> char {
        if self.has_blocks { '●' } else { 'o' }
    }

    /// A patch of colour.
    pub(crate) fn block(self) -> &'static str {
        if self.has_blocks { "■" } else { "#" }
    }

    pub(crate) fn dot(self) -> &'static str {
        if self.has_blocks { " · " } else { " - " }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_says_what_the_terminal_can_show() {
        let check = |set: &[(&str, &str)], has_colors, has_blocks| {
            let find = |name: &str| {
                let found = set.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            assert_eq!(
                Theme::of(find),
                Theme {
                    has_colors,
                    has_blocks
                },
                "{set:?}"
            );
        };
        check(&[], true, false);
        check(&[("LANG", "ko_KR.UTF-8")], true, true);
        check(&[("LANG", "en_US.UTF-8"), ("LC_ALL", "C")], true, false);
        check(&[("LC_ALL", ""), ("LC_CTYPE", "C.utf8")], true, true);
        check(&[("LANG", "C.UTF-8"), ("NO_COLOR", "1")], false, true);
        check(&[("LANG", "C.UTF-8"), ("NO_COLOR", "")], true, true);
        check(&[("TERM", "dumb")], false, false);
    }

    #[test]
    fn a_bar_is_as_long_as_its_place_whatever_it_shows() {
        for has_blocks in [false, true] {
            let theme = Theme {
                has_colors: true,
                has_blocks,
            };
            for width in 0..20 {
                for share in [-1.0, 0.0, 0.01, 0.3, 0.5, 0.999, 1.0, 7.0, f64::NAN] {
                    let (full, rest) = theme.bar(share, width);
                    assert_eq!(
                        full.chars().count() + rest.chars().count(),
                        width,
                        "{share}"
                    );
                }
            }
        }
        let theme = Theme {
            has_colors: false,
            has_blocks: true,
        };
        assert_eq!(
            theme.bar(0.62, 10),
            ("██████▎".to_owned(), "···".to_owned())
        );
    }

    #[test]
    fn a_history_shows_the_least_work_and_no_work_differently() {
        let theme = Theme {
            has_colors: false,
            has_blocks: true,
        };
        let text: String = [None, Some(0), Some(1), Some(50), Some(100), Some(255)]
            .map(|percent| theme.level(percent))
            .into_iter()
            .collect();
        assert_eq!(text, " ·▁▄██");
    }
}

//! What keys mean.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::state::{Focus, Key};

pub(super) fn key(pressed: &KeyEvent) -> Option<Key> {
    let has_control = pressed.modifiers.contains(KeyModifiers::CONTROL);
    Some(match pressed.code {
        KeyCode::Char('c' | 'd') if has_control => Key::Interrupt,
        _ if has_control => return None,
        KeyCode::Char('q') | KeyCode::Esc => Key::Quit,
        KeyCode::Char('?') | KeyCode::F(1) => Key::Help,
        KeyCode::Char(' ') => Key::Pause,
        KeyCode::Up | KeyCode::Char('k') => Key::Move(-1),
        KeyCode::Down | KeyCode::Char('j') => Key::Move(1),
        KeyCode::PageUp => Key::Move(-10),
        KeyCode::PageDown => Key::Move(10),
        KeyCode::Home | KeyCode::Char('g') => Key::First,
        KeyCode::End | KeyCode::Char('G') => Key::Last,
        KeyCode::Left | KeyCode::Char('h') => Key::Focus(Focus::Devices),
        KeyCode::Right | KeyCode::Char('l') => Key::Focus(Focus::Ranks),
        KeyCode::Tab => Key::NextJob,
        KeyCode::BackTab => Key::PreviousJob,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_mean_what_the_help_says() {
        let check = |code: KeyCode, modifiers: KeyModifiers, expect: Option<Key>| {
            assert_eq!(key(&KeyEvent::new(code, modifiers)), expect, "{code:?}");
        };
        let none = KeyModifiers::NONE;
        check(KeyCode::Char('q'), none, Some(Key::Quit));
        check(KeyCode::Esc, none, Some(Key::Quit));
        check(
            KeyCode::Char('c'),
            KeyModifiers::CONTROL,
            Some(Key::Interrupt),
        );
        check(KeyCode::Char('c'), none, None);
        check(KeyCode::Char('j'), none, Some(Key::Move(1)));
        check(KeyCode::Char('j'), KeyModifiers::CONTROL, None);
        check(KeyCode::Char('G'), KeyModifiers::SHIFT, Some(Key::Last));
        check(
            KeyCode::BackTab,
            KeyModifiers::SHIFT,
            Some(Key::PreviousJob),
        );
        check(KeyCode::F(5), none, None);
    }
}

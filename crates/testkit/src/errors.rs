//! Errors as a user reads them.

use std::process::ExitCode;

use candle::Error;

/// The chain of `error` in one line, each cause once and without the backtraces that candle prints with its own errors.
pub fn chain(error: &anyhow::Error) -> String {
    let mut texts: Vec<String> = vec![];
    for cause in error.chain() {
        let text = cause.downcast_ref::<Error>().map_or_else(|| cause.to_string(), plain);
        if texts.last().is_none_or(|last| !last.ends_with(&text)) {
            texts.push(text);
        }
    }
    texts.join(": ")
}

/// How a program ends: `false`, and an error, which is printed, are failures.
pub fn exit(result: anyhow::Result<bool>) -> ExitCode {
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {}", chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// `error` by the command-line `option` that caused it, in place of the library's own name for it: `arch: ..` becomes `--arch: ..`.
pub fn of_option(option: &str, error: impl Into<anyhow::Error>) -> anyhow::Error {
    let text = chain(&error.into());
    let rest = text.strip_prefix(option.trim_start_matches('-')).map_or(&*text, |rest| rest.trim_start_matches([':', ' ']));
    anyhow::anyhow!("{option}: {rest}")
}

/// candle's error without its backtraces.
fn plain(error: &Error) -> String {
    match error {
        Error::WithBacktrace { inner, .. } => plain(inner),
        Error::WithPath { inner, path } => format!("{}: {}", path.display(), plain(inner)),
        Error::Context { inner, context } => format!("{context}: {}", plain(inner)),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::backtrace::Backtrace;

    use anyhow::Context;

    use super::*;

    #[test]
    fn options_are_named_once() {
        let by_option = |text: &str| of_option("--arch", Error::Msg(text.into()).bt()).to_string();
        assert_eq!(by_option("arch: \"sm86\" is none"), "--arch: \"sm86\" is none");
        assert_eq!(by_option("no device"), "--arch: no device");
    }

    #[test]
    fn causes_come_once_and_without_backtraces() {
        let inner = || Box::new(Error::Msg("no such page".into()));
        let traced = Error::WithBacktrace { inner: inner(), backtrace: Box::new(Backtrace::force_capture()) };
        let error = Err::<(), _>(traced.with_path("a/b")).context("reading").unwrap_err();
        assert_eq!(chain(&error), "reading: a/b: no such page");
        let os = Error::Io(std::io::Error::new(std::io::ErrorKind::NotFound, "gone"));
        assert_eq!(chain(&anyhow::Error::from(os).context("x")), "x: gone");
    }
}

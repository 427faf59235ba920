//! The output for the user.

use std::{fmt::Write as _, path::Path};

use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;

use crate::{
    error::{Result, shown},
    files,
    generate::Generation,
    tokenizer::Tokenizer,
    verdict::{Moved, Verdict, is_as_it_should_be},
};

/// A request with its result.
#[derive(Debug)]
pub(crate) struct Row<'a> {
    pub(crate) adapter: Option<&'a str>,
    pub(crate) scale: f32,
    pub(crate) prompt: &'a [u32],
    /// Index of its batch, if the adapters are in a pool.
    pub(crate) batch: Option<usize>,
    pub(crate) generation: &'a Generation,
    /// How far its logits are from the base model's, if that was asked for.
    pub(crate) moved: Option<Moved>,
    /// What verification says, if it was asked for.
    pub(crate) verdict: Option<Verdict>,
}

impl Row<'_> {
    /// Whether the base model's rows have the very bits they have without adapters, and verification passes.
    pub(crate) fn is_as_it_should_be(&self) -> bool {
        is_as_it_should_be(self.adapter.is_some(), self.moved, self.verdict)
    }
}

/// One line of JSON for each request.
pub(crate) fn json_lines(rows: &[Row<'_>], tokenizer: Option<&Tokenizer>) -> Result<String> {
    let mut lines = String::new();
    for row in rows {
        let mut line = json!({
            "adapter": row.adapter,
            "prompt_tokens": row.prompt,
            "generated_tokens": row.generation.tokens,
            "text": tokenizer.map(|tokenizer| tokenizer.decode(&row.generation.tokens, true)).transpose()?,
        });
        if let Some(batch) = row.batch {
            line["batch"] = json!(batch);
        }
        if let Some(Verdict { difference, tolerance, tokens_agree }) = row.verdict {
            line["verify"] = json!({ "difference": difference, "tolerance": tolerance, "tokens_agree": tokens_agree });
        }
        writeln!(lines, "{line}")?;
    }
    Ok(lines)
}

/// A table to read.
pub(crate) fn table(rows: &[Row<'_>], tokenizer: Option<&Tokenizer>) -> Result<String> {
    let mut cells = vec![["adapter", "prompt", "generated", "logits against the base model's"].map(String::from)];
    for row in rows {
        let text = |tokens: &[u32]| match tokenizer {
            Some(tokenizer) => tokenizer.decode(tokens, true).map(|text| shortened(&text)),
            None => Ok(shortened(&format!("{tokens:?}"))),
        };
        cells.push([
            adapter(row),
            text(row.prompt)?,
            text(&row.generation.tokens)?,
            match row.moved {
                Some(Moved { identical: true, .. }) => "the same, bit for bit".into(),
                Some(Moved { difference, .. }) => format!("moved by up to {difference:.3}"),
                None => String::new(),
            },
        ]);
    }
    let widths = [0, 1, 2, 3].map(|column| cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    let mut table = String::new();
    for row in cells {
        let padded = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect::<Vec<_>>();
        writeln!(table, "{}", padded.join("  ").trim_end())?;
    }
    Ok(table)
}

/// What verification says of each request, one line each.
pub(crate) fn verdicts(rows: &[Row<'_>]) -> Result<String> {
    let mut lines = String::new();
    for (index, row) in rows.iter().enumerate() {
        let Some(verdict) = row.verdict else { continue };
        writeln!(
            lines,
            "verify: request {index} ({}): largest logit difference {:.3e}, tolerance {:.3e}, tokens {}: {}",
            adapter(row),
            verdict.difference,
            verdict.tolerance,
            if verdict.tokens_agree { "agree" } else { "differ" },
            if verdict.passes() { "passes" } else { "FAILS" },
        )?;
    }
    Ok(lines)
}

/// Writes the logits that chose each token: a tensor `request.I` of `[tokens, vocab]` for each request.
pub(crate) fn write_logits(path: &Path, rows: &[Row<'_>]) -> Result<()> {
    let tensors = rows.iter().enumerate().map(|(index, row)| {
        let Generation { tokens, logits } = row.generation;
        let shape = vec![tokens.len(), logits.len() / tokens.len()];
        Ok((format!("request.{index}"), TensorView::new(Dtype::F32, shape, bytemuck::cast_slice(logits))?))
    });
    let tensors: Vec<_> = tensors.collect::<Result<_>>()?;
    files::write_new(path, &safetensors::serialize(tensors, None)?)
}

fn adapter(row: &Row<'_>) -> String {
    match row.adapter {
        None => "(base)".into(),
        Some(name) if row.scale == 1.0 => shown(name),
        Some(name) => format!("{} x{}", shown(name), row.scale),
    }
}

/// At most 60 characters, on one line.
fn shortened(text: &str) -> String {
    const CHARS: usize = 60;
    let text = shown(text.trim());
    match text.chars().count().checked_sub(CHARS) {
        Some(excess @ 1..) => format!("…{}", text.chars().skip(excess + 1).collect::<String>()),
        _ => text,
    }
}

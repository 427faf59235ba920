//! Tables and plots of measured figures. It measures nothing and needs no GPU.

use std::{fs, path::PathBuf};

use aril_bench::{
    Result, documents,
    record::{self, Record},
    results::{self, Others, Results},
    selection::{Chosen, Selection},
    workload::Suite,
};
use clap::{Parser, Subcommand, ValueEnum as _};

#[derive(Debug, Parser)]
#[command(about = "Shows the figures that the benchmarks measured")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Writes the plots to benches/plots and the tables into README.md and benches/README.md
    Docs {
        /// A folder of benches/record [default: that of the newest GPU]
        #[arg(long)]
        record: Option<String>,
    },
    /// Prints the tables of files of results
    Tables {
        /// Our results
        #[arg(required = true)]
        results: Vec<PathBuf>,
        /// Results of other libraries on the same kind of device. May be repeated: the first file that has a figure
        /// counts
        #[arg(long)]
        against: Vec<PathBuf>,
        #[command(flatten)]
        selection: Selection,
    },
    /// Reduces results of other libraries to the fastest at each workload
    Others {
        /// What their runner wrote. The first file that has a figure counts
        #[arg(required = true)]
        results: Vec<PathBuf>,
        #[arg(long)]
        out: PathBuf,
        /// Where they are from, for the file's `about`
        #[arg(
            long,
            default_value = "The fastest other library at each workload; of experts also the fastest that only writes \
                             deltas."
        )]
        about: String,
    },
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Docs { record } => {
            let root = record::repository();
            let record = record.map_or_else(|| Record::newest(&root), |folder| Record::load(&root, &folder))?;
            for (path, content) in documents::of(&root, &record)? {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap_or(&path))?;
                fs::write(path, content)?;
            }
        }
        Command::Tables { results, against, selection } => {
            let (chosen, others) = (Chosen::new(&selection, Suite::value_variants())?, Others::load(&against)?);
            for path in results {
                let tables = record::tables(&Results::load(&path)?, &chosen, &others);
                tables.iter().for_each(|table| println!("{table}"));
            }
        }
        Command::Others { results, out, about } => results::save(&Others::reduced(&results, &about)?, &out)?,
    }
    Ok(())
}

"""Files of texts to files of embeddings."""

from ftbert.files.embed import BATCH_RECORDS, EmbedStats, check_request, embed_file
from ftbert.files.formats import open_source
from ftbert.files.paths import output_file, skipped_file, stream_or_file
from ftbert.files.ranges import CALIBRATION_TEXTS
from ftbert.files.records import Position, ReadOptions
from ftbert.staging_folder import staging_path

__all__ = [
    "BATCH_RECORDS", "CALIBRATION_TEXTS", "EmbedStats", "Position", "ReadOptions", "check_request", "embed_file",
    "open_source", "output_file", "skipped_file", "staging_path", "stream_or_file",
]  # fmt: skip

import java.io.BufferedOutputStream;
import java.io.BufferedReader;
import java.io.DataOutputStream;
import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.lucene.analysis.core.WhitespaceAnalyzer;
import org.apache.lucene.document.Document;
import org.apache.lucene.document.Field;
import org.apache.lucene.document.FieldType;
import org.apache.lucene.index.DirectoryReader;
import org.apache.lucene.index.IndexOptions;
import org.apache.lucene.index.IndexWriter;
import org.apache.lucene.index.IndexWriterConfig;
import org.apache.lucene.index.LogDocMergePolicy;
import org.apache.lucene.index.SerialMergeScheduler;
import org.apache.lucene.index.Term;
import org.apache.lucene.search.BooleanClause;
import org.apache.lucene.search.BooleanQuery;
import org.apache.lucene.search.BoostQuery;
import org.apache.lucene.search.IndexSearcher;
import org.apache.lucene.search.Query;
import org.apache.lucene.search.ScoreDoc;
import org.apache.lucene.search.TermQuery;
import org.apache.lucene.search.similarities.BM25Similarity;
import org.apache.lucene.store.Directory;
import org.apache.lucene.store.FSDirectory;
import org.apache.lucene.util.Version;

/**
 * Indexes and searches texts that are terms with spaces between them, one text a line, with one thread.
 *
 * index TERMS FOLDER                 prints "version documents seconds"
 * search FOLDER WARM_UP (QUERIES K OUT)...  writes to each OUT, big-endian: the queries' nanoseconds (int64), their numbers of hits
 *                                    (int32), then all documents (int32) and all scores (float32), best first, in the queries' order
 *
 * Seconds are CPU time of the thread that works, without the compiler and the garbage collector. WARM_UP of the first queries come before,
 * unmeasured. A term that a query repeats counts as often, as the query parser makes it. Documents keep the order of the lines.
 */
public final class LuceneSearch {
  private static final String FIELD = "terms";

  public static void main(String[] arguments) throws IOException {
    switch (arguments[0]) {
      case "index" -> index(Path.of(arguments[1]), Path.of(arguments[2]));
      case "search" -> search(arguments);
      default -> throw new IllegalArgumentException("index or search, got " + arguments[0]);
    }
  }

  private static void index(Path terms, Path folder) throws IOException {
    IndexWriterConfig config = new IndexWriterConfig(new WhitespaceAnalyzer());
    config.setSimilarity(new BM25Similarity(1.2f, 0.75f));
    config.setMergePolicy(new LogDocMergePolicy()); // merges neighbours only, so that the order stays
    config.setMergeScheduler(new SerialMergeScheduler());
    config.setRAMBufferSizeMB(1024);
    config.setUseCompoundFile(false);
    FieldType type = new FieldType();
    type.setIndexOptions(IndexOptions.DOCS_AND_FREQS);
    type.setTokenized(true);
    type.freeze();
    long began = cpuNanos();
    int documents = 0;
    try (Directory directory = FSDirectory.open(folder);
        IndexWriter writer = new IndexWriter(directory, config);
        BufferedReader reader = Files.newBufferedReader(terms, StandardCharsets.UTF_8)) {
      Field field = new Field(FIELD, "", type);
      Document document = new Document();
      document.add(field);
      for (String line = reader.readLine(); line != null; line = reader.readLine()) {
        field.setStringValue(line);
        writer.addDocument(document);
        documents++;
      }
      writer.forceMerge(1);
      writer.commit();
    }
    System.out.println(Version.LATEST + " " + documents + " " + (cpuNanos() - began) / 1e9);
  }

  private static void search(String[] arguments) throws IOException {
    IndexSearcher.setMaxClauseCount(Integer.MAX_VALUE);
    try (Directory directory = FSDirectory.open(Path.of(arguments[1]));
        DirectoryReader reader = DirectoryReader.open(directory)) {
      IndexSearcher searcher = new IndexSearcher(reader);
      searcher.setSimilarity(new BM25Similarity(1.2f, 0.75f));
      searcher.setQueryCache(null); // every query counts as if it were the first
      int warmUp = Integer.parseInt(arguments[2]);
      for (int at = 3; at < arguments.length; at += 3) {
        List<String> lines = Files.readAllLines(Path.of(arguments[at]), StandardCharsets.UTF_8);
        int limit = Integer.parseInt(arguments[at + 1]);
        for (; warmUp > 0 && !lines.isEmpty(); warmUp--) {
          searcher.search(query(lines.get(warmUp % lines.size())), limit);
        }
        search(searcher, lines, limit, Path.of(arguments[at + 2]));
      }
    }
  }

  private static void search(IndexSearcher searcher, List<String> lines, int limit, Path out) throws IOException {
    long[] nanos = new long[lines.size()];
    List<int[]> documents = new ArrayList<>();
    List<float[]> scores = new ArrayList<>();
    for (int i = 0; i < nanos.length; i++) {
      long began = cpuNanos();
      ScoreDoc[] hits = searcher.search(query(lines.get(i)), limit).scoreDocs;
      nanos[i] = cpuNanos() - began;
      documents.add(new int[hits.length]);
      scores.add(new float[hits.length]);
      for (int rank = 0; rank < hits.length; rank++) {
        documents.get(i)[rank] = hits[rank].doc;
        scores.get(i)[rank] = hits[rank].score;
      }
    }
    try (DataOutputStream output = new DataOutputStream(new BufferedOutputStream(Files.newOutputStream(out), 1 << 20))) {
      for (long value : nanos) {
        output.writeLong(value);
      }
      for (int[] hits : documents) {
        output.writeInt(hits.length);
      }
      for (int[] hits : documents) {
        for (int document : hits) {
          output.writeInt(document);
        }
      }
      for (float[] hits : scores) {
        for (float score : hits) {
          output.writeFloat(score);
        }
      }
    }
  }

  private static Query query(String line) {
    Map<String, Integer> counts = new LinkedHashMap<>();
    for (String term : line.split(" ")) {
      counts.merge(term, 1, Integer::sum);
    }
    BooleanQuery.Builder builder = new BooleanQuery.Builder();
    counts.forEach(
        (term, count) -> {
          Query clause = new TermQuery(new Term(FIELD, term));
          builder.add(count == 1 ? clause : new BoostQuery(clause, count), BooleanClause.Occur.SHOULD);
        });
    return builder.build();
  }

  private static long cpuNanos() {
    return ManagementFactory.getThreadMXBean().getCurrentThreadCpuTime();
  }
}

import java.io.BufferedReader;
import java.io.BufferedWriter;
import java.io.IOException;
import java.io.StringReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.Map;
import org.apache.lucene.analysis.Analyzer;
import org.apache.lucene.analysis.TokenStream;
import org.apache.lucene.analysis.standard.StandardAnalyzer;
import org.apache.lucene.analysis.tokenattributes.CharTermAttribute;
import org.apache.lucene.document.Document;
import org.apache.lucene.document.Field;
import org.apache.lucene.document.FieldType;
import org.apache.lucene.document.StoredField;
import org.apache.lucene.index.DirectoryReader;
import org.apache.lucene.index.IndexOptions;
import org.apache.lucene.index.IndexWriter;
import org.apache.lucene.index.IndexWriterConfig;
import org.apache.lucene.index.LogDocMergePolicy;
import org.apache.lucene.index.SerialMergeScheduler;
import org.apache.lucene.index.StoredFields;
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
import org.apache.lucene.util.FixedBitSet;

/**
 * The job of `cramlm select` with Lucene in one process: open an index, analyze and search every distinct text, write the union's texts.
 *
 * index TEXTS FOLDER                 indexes and stores a file with one text a line
 * select FOLDER QUERIES K OUT        writes the best K texts of all queries, one a line, each once, and prints their number
 *
 * Lines instead of JSON: Lucene alone has no parser for it, and without it this side has less to do.
 */
public final class LuceneSelect {
  private static final String TERMS = "terms";
  private static final String TEXT = "text";

  public static void main(String[] arguments) throws IOException {
    switch (arguments[0]) {
      case "index" -> index(Path.of(arguments[1]), Path.of(arguments[2]));
      case "select" -> select(Path.of(arguments[1]), Path.of(arguments[2]), Integer.parseInt(arguments[3]), Path.of(arguments[4]));
      default -> throw new IllegalArgumentException("index or select, got " + arguments[0]);
    }
  }

  private static void index(Path texts, Path folder) throws IOException {
    IndexWriterConfig config = new IndexWriterConfig(new StandardAnalyzer());
    config.setSimilarity(new BM25Similarity(1.2f, 0.75f));
    config.setMergePolicy(new LogDocMergePolicy());
    config.setMergeScheduler(new SerialMergeScheduler());
    config.setRAMBufferSizeMB(1024);
    FieldType type = new FieldType();
    type.setIndexOptions(IndexOptions.DOCS_AND_FREQS);
    type.setTokenized(true);
    type.freeze();
    try (Directory directory = FSDirectory.open(folder);
        IndexWriter writer = new IndexWriter(directory, config);
        BufferedReader reader = Files.newBufferedReader(texts, StandardCharsets.UTF_8)) {
      for (String line = reader.readLine(); line != null; line = reader.readLine()) {
        Document document = new Document();
        document.add(new Field(TERMS, line, type));
        document.add(new StoredField(TEXT, line));
        writer.addDocument(document);
      }
      writer.forceMerge(1);
      writer.commit();
    }
  }

  private static void select(Path folder, Path queries, int limit, Path out) throws IOException {
    IndexSearcher.setMaxClauseCount(Integer.MAX_VALUE);
    try (Directory directory = FSDirectory.open(folder);
        DirectoryReader reader = DirectoryReader.open(directory);
        Analyzer analyzer = new StandardAnalyzer()) {
      IndexSearcher searcher = new IndexSearcher(reader);
      searcher.setSimilarity(new BM25Similarity(1.2f, 0.75f));
      searcher.setQueryCache(null); // every text is searched once
      FixedBitSet union = new FixedBitSet(reader.maxDoc());
      for (String text : new LinkedHashSet<>(Files.readAllLines(queries, StandardCharsets.UTF_8))) {
        for (ScoreDoc hit : searcher.search(query(analyzer, text), limit).scoreDocs) {
          union.set(hit.doc);
        }
      }
      StoredFields stored = reader.storedFields();
      try (BufferedWriter writer = Files.newBufferedWriter(out, StandardCharsets.UTF_8)) {
        for (int document = 0; document < union.length(); document++) {
          if (union.get(document)) {
            writer.write(stored.document(document).get(TEXT));
            writer.newLine();
          }
        }
      }
      System.out.println(union.cardinality());
    }
  }

  private static Query query(Analyzer analyzer, String text) throws IOException {
    Map<String, Integer> counts = new LinkedHashMap<>();
    try (TokenStream tokens = analyzer.tokenStream(TERMS, new StringReader(text))) {
      CharTermAttribute term = tokens.addAttribute(CharTermAttribute.class);
      for (tokens.reset(); tokens.incrementToken(); ) {
        counts.merge(term.toString(), 1, Integer::sum);
      }
      tokens.end();
    }
    BooleanQuery.Builder builder = new BooleanQuery.Builder();
    counts.forEach(
        (term, count) -> {
          Query clause = new TermQuery(new Term(TERMS, term));
          builder.add(count == 1 ? clause : new BoostQuery(clause, count), BooleanClause.Occur.SHOULD);
        });
    return builder.build();
  }
}

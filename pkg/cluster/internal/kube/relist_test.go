package kube

import (
	"io"
	"net/http"
	"strings"
	"testing"
)

type asked struct{ queries []string }

func (a *asked) RoundTrip(q *http.Request) (*http.Response, error) {
	a.queries = append(a.queries, q.URL.Query().Encode())
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(`{"metadata":{"resourceVersion":"7"}}`))}, nil
}

// TestRelistingAsksForOneName: the API server goes through all objects for a list with a limit, and each watch of each agent begins anew every few minutes.
func TestRelistingAsksForOneName(t *testing.T) {
	for from, want := range map[string]int{"5": 2, "8": 1} { // a watch from what was not reached is not begun
		a := &asked{}
		q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://server/volumes?watch=1&resourceVersion="+from, nil)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := (relisting{a}).RoundTrip(q)
		if (err == nil) != (want == 2) || len(a.queries) != want || a.queries[0] != "fieldSelector=metadata.name%3D-" {
			t.Errorf("a watch from %s: %v, asked for %q", from, err, a.queries)
		}
		if err == nil {
			_ = answer.Body.Close() // it has nothing to close
		}
	}
}

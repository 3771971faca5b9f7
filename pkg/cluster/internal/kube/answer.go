package kube

import (
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// answering fails with ErrUnavailable where "not found" says nothing of an object: the API server has no such kind of objects, as the
// definitions are not there, or what answered is a proxy before it. client-go would say the same of both as of an object that is gone, and
// that is how a volume is taken for deleted, and a node for gone for good.
type answering struct{ http.RoundTripper }

// mostSaid is how much of such an answer is told, in bytes.
const mostSaid = 256

func (a answering) RoundTrip(q *http.Request) (*http.Response, error) {
	answer, err := a.RoundTripper.RoundTrip(q)
	// Of objects the API server answers with one of its own: a Status, in JSON or protobuf.
	if err != nil || answer.StatusCode != http.StatusNotFound || strings.HasPrefix(answer.Header.Get("Content-Type"), "application/") {
		return answer, err
	}
	defer answer.Body.Close()
	said, err := io.ReadAll(io.LimitReader(answer.Body, mostSaid))
	if err != nil {
		return nil, fmt.Errorf("read the answer: %w", err)
	}
	return nil, fmt.Errorf("%w: the API server has no such kind of objects (%q): if it is one of ashlar.dev, apply the definitions of this driver's version (deploy/kubernetes/crds)",
		errdefs.ErrUnavailable, strings.TrimSpace(string(said)))
}

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
)

// etcd is the API server's store, asked over its gateway (https://etcd.io/docs/v3.6/dev-guide/api_grpc_gateway/). What is put there the API server hears of
// by its own watch, as if another API server had written it.
type etcd struct{ url string }

type keyValue struct {
	Key   []byte `json:"key"`
	Value []byte `json:"value"`
}

// get returns what is at a key.
func (e etcd) get(ctx context.Context, key string) ([]byte, error) {
	var found struct{ Kvs []keyValue }
	if err := e.post(ctx, "kv/range", map[string]any{"key": []byte(key)}, &found); err != nil {
		return nil, err
	}
	if len(found.Kvs) != 1 {
		return nil, fmt.Errorf("etcd has no %s", key)
	}
	return found.Kvs[0].Value, nil
}

// put stores up to 128 values at once (--max-txn-ops of etcd).
func (e etcd) put(ctx context.Context, all []keyValue) error {
	success := make([]map[string]any, len(all))
	for i, one := range all {
		success[i] = map[string]any{"requestPut": one}
	}
	return e.post(ctx, "kv/txn", map[string]any{"success": success}, nil)
}

func (e etcd) post(ctx context.Context, what string, body, into any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url+"/v3/"+what, bytes.NewReader(text))
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	said, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return err
	case response.StatusCode != http.StatusOK:
		return errors.New("etcd: " + response.Status + ": " + string(said))
	case into == nil:
		return nil
	}
	return json.Unmarshal(said, into)
}
